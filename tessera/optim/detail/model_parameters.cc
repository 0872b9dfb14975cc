#include "tessera/optim/detail/model_parameters.h"

#include <set>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/optim/expert_parameters.h"

namespace tessera::optim::detail {
namespace {

using Divisors = std::unordered_map<const c10::TensorImpl*, double>;

void collect_divisors(nn::Module& module, const nn::GradientMarks& marks, Divisors& found) {
  for (const auto& slot : module.own_parameters()) {
    const auto divisor = marks.grad_divisors.find(slot.name);
    if (divisor == marks.grad_divisors.end()) continue;
    TESSERA_CHECK(divisor->second != 0, ErrorKind::kConfig,
                  "[optim.scale_grads] {}: found a gradient divisor of 0, wanted another number", slot.name);
    const auto [at, fresh] = found.emplace(slot.parameter.unsafeGetTensorImpl(), divisor->second);
    TESSERA_CHECK(at->second == divisor->second, ErrorKind::kConfig,
                  "[optim.scale_grads] {}: found the gradient divisors {} and {} from two modules that share the "
                  "parameter, wanted one",
                  slot.name, at->second, divisor->second);
  }
}

}  // namespace

// Two passes: the first one reads the nn::GradientMarks of all modules, because ep_local_experts holds for all
// parameters at or below its module. The second one lists each parameter with the marks that apply to it. A parameter
// that several modules share is identified by its TensorImpl.
std::vector<ModelParameter> model_parameters(const std::vector<nn::Module*>& parts) {
  std::set<const c10::TensorImpl*> seen, experts;
  Divisors divisors;
  for (auto* part : parts) {
    for (const auto& [path, module] : part->named_modules()) {
      const auto* marks = nn::gradient_marks(*module);
      if (marks == nullptr) continue;
      collect_divisors(*module, *marks, divisors);
      if (!marks->ep_local_experts) continue;
      for (const auto& parameter : module->parameters()) experts.insert(parameter.unsafeGetTensorImpl());
    }
  }
  std::vector<ModelParameter> out;
  for (auto* part : parts) {
    for (const auto& named : part->named_parameters()) {
      const at::Tensor& tensor = named.slot->parameter;
      const auto* identity = tensor.unsafeGetTensorImpl();
      if (!seen.insert(identity).second) continue;
      ModelParameter parameter{.name = named.name, .tensor = tensor};
      parameter.local_expert = experts.contains(identity) || is_te_expert_parameter(named.name);
      if (const auto divisor = divisors.find(identity); divisor != divisors.end()) {
        parameter.owner_divisor = divisor->second;
      }
      out.push_back(std::move(parameter));
    }
  }
  return out;
}

}  // namespace tessera::optim::detail
