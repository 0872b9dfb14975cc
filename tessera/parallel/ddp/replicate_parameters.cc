// How ReplicateState collects the module's parameters, compares them on all ranks and copies them from the first rank.
#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/parallel/ddp/replicate_state.h"

namespace tessera {
namespace {

// Describes each parameter by a line "name [shape] dtype", with "frozen" if it needs no gradient. The text must be
// equal on all ranks.
std::string fingerprint(const std::vector<ReplicatedParam>& params) {
  std::string text;
  for (const auto& param : params) {
    text += fmt::format("{} [{}] {}{}\n", param.name, fmt::join(local_tensor_of(param.parameter).sizes(), ", "),
                        c10::toString(param.parameter.scalar_type()), param.parameter.requires_grad() ? "" : " frozen");
  }
  return text;
}

// The first line of `text` that differs from `other`.
std::string_view first_difference(std::string_view text, std::string_view other) {
  const auto at =
      static_cast<size_t>(std::mismatch(text.begin(), text.end(), other.begin(), other.end()).first - text.begin());
  const auto newline = at == 0 ? std::string_view::npos : text.rfind('\n', at - 1);
  const auto begin = newline == std::string_view::npos ? 0 : newline + 1;
  const auto line = text.substr(begin, text.find('\n', begin) - begin);
  return line.empty() ? "nothing more" : line;
}

}  // namespace

bool ReplicateState::parameters_unchanged() {
  size_t trainable = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    for (const auto& slot : params_[i].slots) {
      if (!slot.get().parameter.is_same(params_[i].parameter)) return false;
    }
    const bool was_trainable = trainable < trainable_.size() && trainable_[trainable] == i;
    if (params_[i].parameter.requires_grad() != was_trainable) return false;
    trainable += was_trainable;
  }
  return true;
}

void ReplicateState::collect_parameters() {
  TESSERA_CHECK(
      std::ranges::none_of(buckets_, [](const auto& bucket) { return bucket.accumulated(); }), ErrorKind::kShape,
      "[replicate.forward] parameters were replaced, frozen or unfrozen while gradients were accumulating without "
      "synchronisation. Run a synchronised backward first.");
  ++params_generation_;
  params_.clear();
  casts_.clear();
  trainable_.clear();
  std::unordered_map<const c10::TensorImpl*, size_t> seen;
  for (const auto& named : module_.named_parameters(true)) {
    const at::Tensor& tensor = named.slot->parameter;
    const auto [found, fresh] = seen.emplace(tensor.unsafeGetTensorImpl(), params_.size());
    if (fresh) {
      TESSERA_CHECK(
          !local_tensor_of(tensor).is_meta(), ErrorKind::kShape,
          "[replicate.forward] {}: still on the meta device. Call to_empty(module, device) and initialise or load it "
          "before training.",
          named.name);
      const auto dtype = c10::isFloatingType(tensor.scalar_type())
                             ? options_.mp_policy.param_dtype.value_or(tensor.scalar_type())
                             : tensor.scalar_type();
      if (tensor.requires_grad()) trainable_.push_back(params_.size());
      params_.push_back({.name = named.name, .slots = {}, .parameter = tensor, .compute_dtype = dtype});
    }
    params_[found->second].slots.push_back(SlotRef::of(named));
  }
}

// Checks that the parameters have equal names, shapes, dtypes and requires_grad on all ranks. COLLECTIVE over the mesh.
void ReplicateState::check_equal_on_ranks() {
  const auto own = fingerprint(params_);
  const auto all = comm::all_gather_bytes(group(), own);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    TESSERA_CHECK(
        all[rank] == all[0], ErrorKind::kShape,
        "[replicate.forward] the models differ: rank {} of the mesh has '{}' where rank 0 has '{}'. Replicas must have "
        "the same parameters.",
        rank, first_difference(all[rank], all[0]), first_difference(all[0], all[rank]));
  }
}

// Broadcasts the buffers, and with `parameters` also the parameters, from the mesh's first rank. All broadcasts are in
// flight at once. COLLECTIVE over the mesh.
void ReplicateState::copy_from_first_rank(bool parameters) {
  if (group().size() == 1) return;
  const c10::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // contiguous copy that is broadcast, original tensor
  std::vector<comm::PendingCollective> pending;
  const auto copy = [&](const at::Tensor& tensor, const std::string& name) {
    const at::Tensor local = local_tensor_of(tensor).detach();
    const at::Tensor flat = local.contiguous();
    pending.push_back(comm::broadcast(group(), flat, 0, name));
    if (!flat.is_same(local)) copies.emplace_back(flat, local);
  };
  if (parameters) {
    for (const auto& param : params_) copy(param.parameter, param.name);
  }
  for (const auto& [path, child] : module_.named_modules()) {
    for (const auto& buffer : child->own_buffers()) {
      if (buffer.slot->defined()) copy(*buffer.slot, path.empty() ? buffer.name : path + "." + buffer.name);
    }
  }
  for (auto& each : pending) each.wait();
  for (auto& [from, to] : copies) to.copy_(from);
}

// Parameters may be replaced between forwards (a load with assignment), and a user may freeze some of them. The buckets
// are then made again from the new parameters, in reverse order of registration, until rebuild_buckets() knows the
// order in which their gradients arrive.
void ReplicateState::lazy_init() {
  if (initialized_ && parameters_unchanged()) return;
  collect_parameters();
  check_equal_on_ranks();
  if (!initialized_ && options_.init_sync) copy_from_first_rank(true);
  initialized_ = true;
  will_rebuild_buckets_ = options_.rebuild_buckets && trainable_.size() > 1;
  make_buckets({trainable_.rbegin(), trainable_.rend()}, will_rebuild_buckets_);
}

}  // namespace tessera
