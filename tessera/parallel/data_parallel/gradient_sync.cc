#include "tessera/parallel/data_parallel/gradient_sync.h"

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/parallel/data_parallel/data_parallel_state.h"

namespace tessera {
namespace {

std::vector<DataParallelState*> states_of(nn::Module& module, const char* verb, bool recurse = true) {
  return require_states<DataParallelState>(module, recurse, std::string("parallel.") + verb, "sharded or replicated",
                                           "fully_shard or replicate");
}

}  // namespace

void cast_floating(const nn::TensorRefs& tensors, c10::ScalarType dtype) {
  for (at::Tensor* tensor : tensors) {
    if (tensor->defined() && tensor->is_floating_point() && tensor->scalar_type() != dtype) *tensor = tensor->to(dtype);
  }
}

double fp16_pre_divisor(double divide) {
  double factor = 1;
  while (std::fmod(divide, factor) == 0 && divide / factor > factor) factor *= 2;
  return factor;
}

void set_requires_gradient_sync(nn::Module& module, bool on, bool recurse) {
  for (auto* state : states_of(module, "set_requires_gradient_sync", recurse)) state->set_synchronize(on);
}

void set_gradient_divide_factor(nn::Module& module, double factor) {
  TESSERA_CHECK(factor > 0, ErrorKind::kShape,
                "[parallel.set_gradient_divide_factor] found {}, wanted a positive number", factor);
  for (auto* state : states_of(module, "set_gradient_divide_factor")) state->set_gradient_divisor(factor);
}

NoSync::NoSync(nn::Module& module) {
  for (auto* state : states_of(module, "no_sync")) {
    before_.emplace_back(state, state->synchronizes());
    state->set_synchronize(false);
  }
}

NoSync::~NoSync() {
  for (const auto& [state, on] : before_) state->set_synchronize(on);
}

}  // namespace tessera
