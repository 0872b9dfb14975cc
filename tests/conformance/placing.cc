#include "tests/conformance/placing.h"

#include <rapidcheck.h>

#include <algorithm>
#include <random>
#include <set>

#include "tests/conformance/shares.h"

namespace tessera::testing {

std::vector<Slot> slots_of(const Sample& sample) {
  std::vector<Slot> slots;
  const auto& arguments = sample.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = sample.args[i];
    const bool mutated = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    const bool whole = std::ranges::count(sample.whole, arguments[i].name()) > 0;
    const auto add = [&](int element, const at::Tensor& tensor) {
      if (tensor.defined()) slots.push_back({static_cast<int>(i), element, tensor, mutated, whole});
    };
    if (value.isTensor()) {
      add(-1, value.toTensor());
    } else if (value.isList()) {
      const auto elements = value.toListRef();
      for (size_t j = 0; j < elements.size(); ++j) {
        if (elements[j].isTensor()) add(static_cast<int>(j), elements[j].toTensor());
      }
    }
  }
  return slots;
}

std::vector<c10::IValue> with_tensors(const Sample& sample, const std::vector<Slot>& slots, const Tensors& tensors) {
  std::vector<c10::IValue> args = sample.args;
  for (size_t i = 0; i < slots.size(); ++i) {
    c10::IValue& value = args[slots[i].arg];
    if (slots[i].element < 0) {
      value = tensors[i];
      continue;
    }
    if (slots[i].element == 0 || i == 0 || slots[i - 1].arg != slots[i].arg) {
      value = value.isTensorList() ? c10::IValue(value.toTensorList().copy()) : c10::IValue(value.toList().copy());
    }
    if (value.isTensorList()) {
      value.toTensorList().set(slots[i].element, tensors[i]);
    } else {
      value.toList().set(slots[i].element, tensors[i]);
    }
  }
  return args;
}

namespace {

std::vector<Placement> plain_kinds(const Slot& slot) {
  std::vector<Placement> kinds{Replicate()};
  if (slot.whole) return kinds;
  for (int64_t dim = 0; dim < slot.plain.dim(); ++dim) kinds.push_back(Shard(dim));
  const auto type = slot.plain.scalar_type();  // sums of the narrow types are too coarse to compare
  if (type == at::kDouble || type == at::kFloat || type == at::kLong || type == at::kInt ||
      type == at::kComplexDouble) {
    kinds.push_back(Partial());
  }
  return kinds;
}

std::vector<Placement> other_partials(const Slot& slot) {
  if (slot.whole || (slot.plain.scalar_type() != at::kDouble && slot.plain.scalar_type() != at::kFloat)) return {};
  return {Partial(ReduceOp::kAvg), Partial(ReduceOp::kMax), Partial(ReduceOp::kMin)};
}

std::vector<Combination> of_two(const std::vector<Slot>& slots) {
  std::vector<Combination> all;
  for (const auto& left : plain_kinds(slots[0])) {
    for (const auto& right : plain_kinds(slots[1])) all.push_back({left, right});
  }
  for (const auto& partial : other_partials(slots[0])) {
    all.push_back({partial, Replicate()});
    if (!other_partials(slots[1]).empty()) all.push_back({partial, partial});
  }
  for (const auto& partial : other_partials(slots[1])) all.push_back({Replicate(), partial});
  return all;
}

Placement drawn(const Slot& slot, std::mt19937& random) {
  const auto kinds = plain_kinds(slot);
  return kinds[random() % kinds.size()];
}

std::vector<Combination> of_many(const std::vector<Slot>& slots) {
  std::vector<Combination> all{Combination(slots.size(), Replicate())};
  for (size_t i = 0; i < slots.size(); ++i) {
    for (const auto& kind : plain_kinds(slots[i])) {
      Combination one(slots.size(), Replicate());
      one[i] = kind;
      all.push_back(one);
    }
  }
  int64_t most = 0;
  for (const auto& slot : slots) most = std::max(most, slot.plain.dim());
  for (int64_t dim = -most; dim < most; ++dim) {  // dims are counted from the left, and from the right
    Combination one(slots.size(), Replicate());
    for (size_t i = 0; i < slots.size(); ++i) {
      const int64_t ndim = slots[i].plain.dim();
      const int64_t at = dim < 0 ? dim + ndim : dim;
      if (!slots[i].whole && at >= 0 && at < ndim) one[i] = Shard(at);
    }
    all.push_back(one);
  }
  Combination partial(slots.size(), Replicate());
  std::mt19937 random(1);
  for (size_t i = 0; i < slots.size(); ++i) partial[i] = plain_kinds(slots[i]).back();
  all.push_back(partial);
  constexpr int kRandom = 12;
  for (int round = 0; round < kRandom; ++round) {
    Combination one;
    for (const auto& slot : slots) one.push_back(drawn(slot, random));
    all.push_back(one);
  }
  return all;
}

}  // namespace

std::vector<Combination> combinations(const std::vector<Slot>& slots) {
  std::vector<Combination> all;
  if (slots.empty()) return {{}};
  if (slots.size() == 1) {
    for (const auto& list : {plain_kinds(slots[0]), other_partials(slots[0])}) {
      for (const auto& kind : list) all.push_back({kind});
    }
    return all;
  }
  all = slots.size() == 2 ? of_two(slots) : of_many(slots);
  std::vector<Combination> different;
  std::set<std::string> seen;
  for (auto& one : all) {
    std::string key;
    for (const auto& placement : one) key += to_string(placement) + " ";
    if (seen.insert(key).second) different.push_back(std::move(one));
  }
  return different;
}

namespace {

bool holds(const std::vector<Placement>& list, const Placement& one) {
  return std::ranges::find(list, one) != list.end();
}

// Returns the strided shards first, sorted by dim.
std::vector<Placement> rare_kinds(const Slot& slot, int64_t k) {
  std::vector<Placement> kinds;
  if (slot.whole) return kinds;
  for (int64_t dim = 0; dim < slot.plain.dim(); ++dim) kinds.push_back(StridedShard(dim, 2));
  const auto type = slot.plain.scalar_type();
  const bool nonnegative = type == at::kDouble && !at::any(slot.plain.lt(0)).item<bool>();
  if (c10::isFloatingType(type) && slot.plain.element_size() == 1) {  // the CPU has no arithmetic for these types
    return kinds;
  }
  const auto usual = plain_kinds(slot), others = other_partials(slot);
  for (const auto& partial : partials_of(type, nonnegative, {k})) {
    const bool one_norm_is_enough = partial.kind == Placement::Kind::kNormPartial && partial.norm_order() != 2;
    const bool rounds = is_narrow(type) && (partial.is_partial(ReduceOp::kSum) || partial.is_partial(ReduceOp::kAvg));
    if (!holds(usual, partial) && !holds(others, partial) && !one_norm_is_enough && !rounds) kinds.push_back(partial);
  }
  return kinds;
}

}  // namespace

std::vector<Combination> rare_combinations(const std::vector<Slot>& slots, int64_t k) {
  std::vector<Combination> all;
  for (size_t i = 0; i < slots.size(); ++i) {
    for (const auto& kind : rare_kinds(slots[i], k)) {
      Combination others_whole(slots.size(), Replicate());
      others_whole[i] = kind;
      all.push_back(others_whole);
      // Two combinations: the other tensors sharded in the usual way, or with the same placement as this tensor.
      Combination others_cut = others_whole, alike = others_whole;
      for (size_t j = 0; j < slots.size(); ++j) {
        if (j == i || slots[j].whole) continue;
        if (slots[j].plain.dim() > 0) others_cut[j] = Shard(0);
        if (holds(rare_kinds(slots[j], k), kind)) alike[j] = kind;
      }
      for (const auto& one : {others_cut, alike}) {
        if (std::ranges::find(all, one) == all.end()) all.push_back(one);
      }
    }
  }
  return all;
}

std::vector<Placements> random_placements(const std::vector<Slot>& slots, int64_t mesh_ndim, rc::Random& random) {
  std::vector<Placements> all;
  for (const auto& slot : slots) {
    Placements one;
    for (int64_t m = 0; m < mesh_ndim; ++m) {
      one.push_back(rc::gen::elementOf(plain_kinds(slot))(random.split(), rc::kNominalSize).value());
    }
    all.push_back(std::move(one));
  }
  return all;
}

namespace {

// Returns the share of rank r of k in a Partial tensor. For the Partials that PyTorch's tables have, the share is that
// of oracle/samples.py.
at::Tensor share(const at::Tensor& whole, const Placement& placement, int64_t r, int64_t k) {
  const ReduceOp op = placement.reduce_op;
  const auto type = whole.scalar_type();
  const bool shared_with_oracle = type == at::kDouble || type == at::kFloat || type == at::kComplexDouble ||
                                  ((type == at::kLong || type == at::kInt) && op == ReduceOp::kSum);
  if (placement.kind == Placement::Kind::kNormPartial || op == ReduceOp::kProduct || !shared_with_oracle) {
    return share_of(whole, placement, r, k);
  }
  if (!whole.is_floating_point() && !whole.is_complex()) return r == 0 ? whole - 3 * (k - 1) : at::full_like(whole, 3);
  // The weights sum to one; some are negative.
  const double weight = r == 0 ? 1 + 0.25 * static_cast<double>(k / 2) - 0.5 * static_cast<double>((k - 1) / 2)
                               : (r % 2 == 1 ? -0.25 : 0.5);
  switch (op) {
    case ReduceOp::kSum:
      return whole * weight;
    case ReduceOp::kAvg:
      return whole * (weight * static_cast<double>(k));
    default: {
      const at::Tensor below =
          ((at::arange(whole.numel(), at::kLong) + r) % k).to(whole.scalar_type()).view(whole.sizes()) * 0.5;
      return op == ReduceOp::kMax ? whole - below : whole + below;
    }
  }
}

}  // namespace

at::Tensor place(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements) {
  const at::NoGradGuard no_grad;
  at::Tensor shared = whole.detach();
  Placements cut = placements;
  for (int64_t m = 0; m < mesh->ndim(); ++m) {
    if (placements[m].is_partial()) {
      shared = share(shared, placements[m], (*mesh->coordinate())[m], mesh->shape()[m]);
      cut[m] = Replicate();
    }
  }
  const at::Tensor spread = distribute_tensor(shared.clone(), mesh, cut, std::nullopt);
  if (cut == placements) return spread;
  return from_local(to_local(spread), mesh, placements,
                    {.shape = whole.sizes().vec(), .stride = whole.contiguous().strides().vec()});
}

std::string describe(const std::vector<Placements>& placements) {
  std::string text;
  for (const auto& one : placements) {
    text += (text.empty() ? "" : " ") + (one.size() == 1 ? to_string(one[0]) : to_string(one));
  }
  return text;
}

}  // namespace tessera::testing
