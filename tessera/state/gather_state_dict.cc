#include "tessera/state/gather_state_dict.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/state/detail/cpu_memory.h"
#include "tessera/state/detail/map_tensors.h"
#include "tessera/state/sharded_tensor.h"
#include "tessera/state/state_dict_structure.h"

namespace tessera {
namespace detail {

at::Tensor dtensor_with_local(const at::Tensor& dtensor, const at::Tensor& local) {
  return from_local(local, device_mesh(dtensor), placements(dtensor),
                    {.shape = dtensor.sizes().vec(), .stride = dtensor.strides().vec()});
}

StateValue map_local_parts(const StateValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.is_tensor() && value.tensor().defined()) {
    const at::Tensor detached = value.tensor().detach();
    if (!is_dtensor(detached)) return change(detached);
    const at::Tensor local = to_local(detached), changed = change(local);
    return changed.is_same(local) ? value : dtensor_with_local(detached, changed);
  }
  if (value.is_sharded() && value.sharded()) {
    auto out = std::make_shared<ShardedTensor>(*value.sharded());
    for (auto& shard : out->local_shards) shard.tensor = change(shard.tensor.detach());
    return out;
  }
  return value;
}

// The all-gather runs on the mesh's device. A local tensor on another device (after offloading to the CPU) is moved
// there first.
at::Tensor gather_full_tensor(const at::Tensor& dtensor, const char* where) {
  const at::Tensor detached = dtensor.detach(), local = to_local(detached);
  TESSERA_CHECK(!local.is_meta(), ErrorKind::kShape,
                "{} found a DTensor on the meta device, which has no values. Call to_empty and load it.", where);
  const auto device = device_mesh(dtensor)->device();
  const bool is_there = local.device().type() == device.type();
  return full_tensor(is_there ? detached : dtensor_with_local(detached, local.to(device)));
}

void wait_for_copies(const std::optional<c10::Device>& device) {
  if (device) c10::impl::VirtualGuardImpl(device->type()).synchronizeDevice(device->has_index() ? device->index() : -1);
}

}  // namespace detail

namespace {

// Returns the global rank of this process from the mesh or the group of the first distributed tensor in the dict, or
// nullopt without one.
std::optional<int> rank_known_by(const StateDict& state_dict) {
  std::optional<int> rank;
  any_leaf(state_dict, [&](const StateValue& leaf) {
    if (leaf.is_tensor() && leaf.tensor().defined() && is_dtensor(leaf.tensor())) {
      rank = device_mesh(leaf.tensor())->rank();
    } else if (leaf.is_sharded() && leaf.sharded() && leaf.sharded()->group) {
      const auto& group = *leaf.sharded()->group;
      rank = group.ranks()[static_cast<size_t>(group.rank())];
    }
    return rank.has_value();
  });
  return rank;
}

// Walks a nested dict once. Each tensor is passed to the member of LeafFunctions for its type. This happens on every
// rank, because the function may be a collective; only then does `keeps_result` decide whether this rank stores the
// result. If there is a companion dict (IterateOptions::companion), it is walked in parallel, by the same keys and
// positions.
class StateDictWalk {
 public:
  StateDictWalk(const LeafFunctions& functions, const IterateOptions& options, bool keeps_result)
      : functions_(functions), options_(options), keeps_result_(keeps_result) {}

  // `companion` is the value that the companion dict has at `path`, or null without a companion dict.
  StateValue visit(const StateValue& value, const StateValue* companion, const std::string& path) {
    if (value.is_dict()) return visit_dict(value.dict(), companion, path);
    if (const auto* items = items_of(value)) {
      auto visited = visit_items(*items, companion, path);
      if (value.is_list()) return visited;
      return StateTuple{std::move(visited)};
    }
    StateValue result = leaf(value, path);
    if (!keeps_result_) return {};
    if (companion && (result.is_tensor() || result.is_sharded())) return copied(result, *companion, path);
    if (!options_.cpu_offload) return result;
    return detail::map_local_parts(result, [&](const at::Tensor& local) { return moved_to_cpu(local); });
  }

  // The device of non-blocking copies that may still be running; nullopt when there are none.
  const std::optional<c10::Device>& accelerator() const { return accelerator_; }

 private:
  [[noreturn]] static void mismatch(const std::string& path, const std::string& reason) {
    raise(ErrorKind::kShape,
          "[state.copy] CompanionMismatch at {}: {}. Make the companion again with create_cpu_state_dict.", quote(path),
          reason);
  }

  StateValue leaf(const StateValue& value, const std::string& path) {
    const bool is_hollow = (value.is_tensor() && !value.tensor().defined()) || (value.is_sharded() && !value.sharded());
    if (is_hollow) {
      TESSERA_CHECK(!options_.type_check, ErrorKind::kShape,
                    "[state.iterate] {}: Unexpected value type, an undefined {}", quote(path), type_name(value));
      return value;
    }
    const auto& function = value.is_sharded()           ? functions_.sharded_tensor_func
                           : !value.is_tensor()         ? kNothing
                           : is_dtensor(value.tensor()) ? functions_.dtensor_func
                                                        : functions_.tensor_func;
    return function ? function(value) : value;
  }

  StateValue visit_dict(const StateDict& dict, const StateValue* companion, const std::string& path) {
    if (companion && !companion->is_dict()) {
      mismatch(path, fmt::format("found a {}, wanted a dict", type_name(*companion)));
    }
    if (companion && companion->dict().size() != dict.size()) {
      mismatch(path, fmt::format("found {} keys, wanted {}", companion->dict().size(), dict.size()));
    }
    StateDict out;
    for (const auto& [key, child] : dict) {
      const auto inner = path.empty() ? to_string(key) : path + "." + to_string(key);
      const StateValue* companion_value = companion ? companion->dict().find(key) : nullptr;
      if (companion && !companion_value) mismatch(inner, "the companion lacks this key");
      auto value = visit(child, companion_value, inner);
      if (keeps_result_) out.set(key, std::move(value));
    }
    return out;
  }

  StateList visit_items(const StateList& items, const StateValue* companion, const std::string& path) {
    const StateList* companion_value = companion ? items_of(*companion) : nullptr;
    if (companion && (!companion_value || companion_value->size() != items.size())) {
      mismatch(path, fmt::format("found a {}{}, wanted {} items", type_name(*companion),
                                 companion_value ? fmt::format(" of {}", companion_value->size()) : "", items.size()));
    }
    StateList out;
    for (size_t i = 0; i < items.size(); ++i) {
      out.push_back(visit(items[i], companion_value ? &(*companion_value)[i] : nullptr, fmt::format("{}.{}", path, i)));
    }
    return out;
  }

  at::Tensor moved_to_cpu(const at::Tensor& local) {
    if (local.is_cpu()) return local;
    note_accelerator(local);
    return local.to(local.options().device(c10::kCPU), options_.non_blocking);
  }

  void note_accelerator(const at::Tensor& tensor) {
    if (options_.non_blocking && !tensor.is_cpu() && !tensor.is_meta()) accelerator_ = tensor.device();
  }

  void copy_local(const at::Tensor& to, const at::Tensor& from, const std::string& path) {
    if (to.sizes() != from.sizes()) {
      mismatch(path, fmt::format("found a tensor of [{}], wanted [{}]", fmt::join(to.sizes(), ", "),
                                 fmt::join(from.sizes(), ", ")));
    }
    note_accelerator(from);
    note_accelerator(to);
    to.copy_(from.detach(), options_.non_blocking);
  }

  // Copies the local tensors of `from` into those of `to`, the value of the companion dict (IterateOptions::companion)
  // at `path`, and returns `to`. The global shapes of two DTensors are compared first, because their local tensors can
  // have the same size although the global shapes differ.
  StateValue copied(const StateValue& from, const StateValue& to, const std::string& path) {
    if (from.is_sharded() && to.is_sharded() && to.sharded()) {
      const auto &source = from.sharded()->local_shards, &target = to.sharded()->local_shards;
      if (source.size() != target.size()) mismatch(path, "it has another number of local shards");
      for (size_t i = 0; i < source.size(); ++i) copy_local(target[i].tensor, source[i].tensor, path);
      return to;
    }
    const bool both_tensors = from.is_tensor() && to.is_tensor() && to.tensor().defined();
    if (!both_tensors || is_dtensor(from.tensor()) != is_dtensor(to.tensor())) {
      mismatch(path, fmt::format("found a {}, wanted a {}", type_name(to), type_name(from)));
    }
    if (is_dtensor(to.tensor()) && from.tensor().sizes() != to.tensor().sizes()) {
      mismatch(path, "it is a DTensor of another shape");
    }
    copy_local(local_tensor_of(to.tensor()), local_tensor_of(from.tensor()), path);
    return to;
  }

  inline static const std::function<StateValue(const StateValue&)> kNothing = {};
  const LeafFunctions& functions_;
  const IterateOptions& options_;
  bool keeps_result_;
  std::optional<c10::Device> accelerator_;
};

// Returns whether this rank gets a result. It is called before any collective, so that an error in the options is
// thrown before another rank waits for this rank.
bool keeps_result(const StateDict& state_dict, const IterateOptions& options) {
  if (options.ranks_only.empty()) return true;
  const auto rank = options.group ? std::optional<int>(options.group->rank()) : rank_known_by(state_dict);
  TESSERA_CHECK(rank, ErrorKind::kConfig,
                "[state.iterate] ranks_only is set, but the rank of this process is unknown: options.group is empty "
                "and the dict has no DTensor or ShardedTensor. Set options.group.");
  return std::ranges::find(options.ranks_only, *rank) != options.ranks_only.end();
}

StateValue gathered_dtensor(const StateValue& value) {
  return detail::gather_full_tensor(value.tensor(), "[state.gather]");
}

StateValue gathered_sharded(const StateValue& value) { return all_gather_sharded_tensor(*value.sharded()); }

}  // namespace

StateDict iterate_state_dict(const StateDict& state_dict, const LeafFunctions& functions,
                             const IterateOptions& options) {
  const c10::NoGradGuard no_grad;
  StateDictWalk walk(functions, options, keeps_result(state_dict, options));
  const StateValue companion = options.companion ? StateValue(*options.companion) : StateValue();
  auto result = walk.visit(state_dict, options.companion ? &companion : nullptr, "");
  detail::wait_for_copies(walk.accelerator());
  return std::move(result.dict());
}

StateDict gather_state_dict(const StateDict& state_dict, const IterateOptions& options) {
  return iterate_state_dict(state_dict, {.sharded_tensor_func = gathered_sharded, .dtensor_func = gathered_dtensor},
                            options);
}

StateDict offload_state_dict_to_cpu(const StateDict& state_dict, const IterateOptions& options) {
  auto offload = options;
  offload.cpu_offload = true;
  return iterate_state_dict(state_dict, {}, offload);
}

StateDict copy_state_dict(const StateDict& state_dict, const StateDict& companion, bool non_blocking, bool type_check) {
  return iterate_state_dict(state_dict, {},
                            {.companion = &companion, .type_check = type_check, .non_blocking = non_blocking});
}

StateDict create_cpu_state_dict(const StateDict& state_dict, const CpuStateDictOptions& options) {
  const c10::NoGradGuard no_grad;
  const auto make = [&](const at::Tensor& local) {
    const auto plain = at::TensorOptions().dtype(local.scalar_type()).device(c10::kCPU);
    if (local.dim() == 0 || local.numel() == 0) return at::zeros(local.sizes(), plain);
    return options.share_memory ? detail::empty_in_shared_memory(local, options.pin_memory)
                                : detail::empty_on_cpu(local, options.pin_memory);
  };
  const auto each = [&](const StateValue& value) { return detail::map_local_parts(value, make); };
  // The new local tensors are contiguous whatever the strides of `tensor` are, so they need no more memory than their
  // elements. dtensor_with_local() is not used, because it would give the new DTensor the strides of `tensor`.
  const auto parts = [&](const StateValue& value) -> StateValue {
    const at::Tensor& tensor = value.tensor();
    return from_local(make(to_local(tensor)), device_mesh(tensor), placements(tensor),
                      FromLocalOptions::contiguous(tensor.sizes().vec()));
  };
  return iterate_state_dict(state_dict, {.sharded_tensor_func = each, .dtensor_func = parts, .tensor_func = each});
}

}  // namespace tessera
