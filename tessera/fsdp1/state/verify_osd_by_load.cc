#include "tessera/fsdp1/state/verify_osd_by_load.h"

#include <ATen/ops/allclose.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <functional>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/fsdp1/state/state_dict_values.h"
#include "tessera/state/gather_state_dict.h"
#include "tessera/state/optimizer_dict.h"

namespace tessera {
namespace {

// Calls `action`. If options.group is set, an error of `action` on one rank is thrown on all ranks of the group.
void attempt_on_group(const VerifyOsdOptions& options, const std::function<void()>& action) {
  if (options.group) return comm::attempt_together(*options.group, action);
  action();
}

// Returns the first difference between two states of a parameter, or "" when they are equal within the tolerances.
std::string difference(const StateDict& found, const StateDict& expected_states, const VerifyOsdOptions& options) {
  for (const auto& [key, value] : expected_states) {
    const auto* own = found.find(key);
    if (!own) return fmt::format("state {} is missing", quote(to_string(key)));
    if (!value.is_tensor() || !own->is_tensor()) {
      if (describe_value(*own) != describe_value(value)) {
        return fmt::format("state {} is {}, expected {}", quote(to_string(key)), scalar_text(*own), scalar_text(value));
      }
      continue;
    }
    const auto &loaded_tensor = own->tensor(), &reference = value.tensor();
    if (loaded_tensor.sizes() != reference.sizes() || loaded_tensor.scalar_type() != reference.scalar_type()) {
      return fmt::format("state {} is {}, expected {}", quote(to_string(key)), describe_value(*own),
                         describe_value(value));
    }
    const at::Tensor here = loaded_tensor.to(reference.device());
    if (!at::allclose(here, reference, options.rtol, options.atol)) {
      return fmt::format("state {} differs by up to {}", quote(to_string(key)),
                         (here - reference).abs().max().item().toDouble());
    }
  }
  for (const auto& [key, value] : found) {
    if (!expected_states.contains(key)) return fmt::format("state {} is not expected", quote(to_string(key)));
  }
  return "";
}

}  // namespace

void verify_osd_by_load(nn::Module& unsharded_model, optim::Optimizer& unsharded_optimizer,
                        const StateDict& optim_state_dict, const optim::Optimizer& reference,
                        const VerifyOsdOptions& options) {
  const c10::NoGradGuard no_grad;
  const auto names = optimizer_parameter_names(unsharded_optimizer);
  std::unordered_map<const void*, int64_t> by_tensor;
  for (size_t id = 0; id < names.size(); ++id) {
    by_tensor[unsharded_optimizer.slot(names[id]).parameter.unsafeGetTensorImpl()] = static_cast<int64_t>(id);
  }
  // A shared parameter may have been saved under any of its names.
  std::unordered_map<std::string, int64_t> ids;
  for (const auto& parameter : unsharded_model.named_parameters(/*all=*/true)) {
    const auto found = by_tensor.find(parameter.slot->parameter.unsafeGetTensorImpl());
    if (found != by_tensor.end()) ids[parameter.name] = found->second;
  }

  StateDict states;
  // All values are gathered before an error is thrown, because gathering is COLLECTIVE.
  std::string fault;
  for (const auto& [key, state] : optim_state_dict.at("state").dict()) {
    const auto id = ids.find(to_string(key));
    if (!state.is_dict()) continue;  // user-defined state
    auto whole = gather_state_dict(state.dict(), {.type_check = false});
    if (id == ids.end()) {
      fault = fmt::format("{} is not a parameter of the unsharded model (twin)", quote(to_string(key)));
    } else {
      states.set(id->second, std::move(whole));
    }
  }
  attempt_on_group(options, [&] {
    TESSERA_CHECK(fault.empty(), ErrorKind::kShape, "[fsdp1.verify] {}", fault);
    StateDict loaded{{"state", std::move(states)}};
    loaded.set("param_groups", optimizer_state_dict(unsharded_optimizer).at("param_groups"));
    load_optimizer_state_dict(unsharded_optimizer, loaded);
    const auto actual = optimizer_state_dict(unsharded_optimizer), expected = optimizer_state_dict(reference);
    const auto &found = actual.at("state").dict(), &expected_states = expected.at("state").dict();
    for (const auto& [key, state] : expected_states) {
      const auto name = names.at(static_cast<size_t>(std::get<int64_t>(key)));
      const auto* own = found.find(key);
      TESSERA_CHECK(own, ErrorKind::kShape, "[fsdp1.verify] {}: the loaded optimizer has no state of this parameter",
                    name);
      const auto text = difference(own->dict(), state.dict(), options);
      TESSERA_CHECK(text.empty(), ErrorKind::kShape, "[fsdp1.verify] {}: {} after loading", name, text);
    }
  });
}

}  // namespace tessera
