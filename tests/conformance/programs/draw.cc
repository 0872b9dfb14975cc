#include "tests/conformance/programs/draw.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/conformance/programs/inputs.h"
#include "tests/conformance/programs/soundness.h"

namespace tessera::testing {

namespace {

constexpr double kLargest = 1e4;
constexpr int64_t kMostElements = 320;
constexpr int64_t kMostDims = 5;

char kind_of(c10::ScalarType type) {
  return c10::isComplexType(type) ? 'c' : c10::isFloatingType(type) ? 'f' : type == at::kBool ? 'b' : 'i';
}

}  // namespace

Draw::Draw(uint64_t seed, std::vector<int64_t> mesh) : state_(seed * 0x2545f4914f6cdd1dULL + 99) {
  for (const int64_t k : mesh) state_ = state_ * 31 + static_cast<uint64_t>(k);
  program_.mesh = std::move(mesh);
  program_.values = seed % 1000003;
  const int64_t k = program_.mesh[0];
  const int64_t all = c10::multiply_integers(program_.mesh);
  const std::vector<int64_t> pool{1, 2, 3, 4, 5, 6, 7, 8, k - 1, k, k + 1, 2 * k, 2 * k + 1, all, all + 1, 2, 3, 4, 6};
  for (int i = 0; i < 3; ++i) extents_.push_back(std::max<int64_t>(one_of(pool), 1));
  if (chance(6)) extents_.push_back(0);
  if (chance(35)) extents_.push_back(1);
  narrow_ = chance(15);
  if (narrow_) {
    float_type_ = one_of(std::vector<c10::ScalarType>{at::kBFloat16, at::kBFloat16, at::kHalf, at::kFloat});
    complex_type_ = at::kComplexFloat;
  }
  int_type_ = one_of(std::vector<c10::ScalarType>{at::kLong, at::kLong, at::kLong, at::kInt, at::kByte});
}

int64_t Draw::below(int64_t n) {
  return static_cast<int64_t>(next_number(state_) % static_cast<uint64_t>(std::max<int64_t>(n, 1)));
}

double Draw::coefficient() { return one_of(std::vector<double>{-2, -1, -0.5, 0.25, 0.5, 1, 1.5, 2, 3}); }

std::vector<int64_t> Draw::some_sizes(int64_t min_dim, int64_t max_dim, bool empty) {
  const auto dims = std::clamp<int64_t>(one_of(std::vector<int64_t>{0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 4}), min_dim,
                                        std::min<int64_t>(max_dim, kMostDims));
  for (;;) {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < dims; ++i) sizes.push_back(one_of(extents_));
    const int64_t count = c10::multiply_integers(sizes);
    if (count <= kMostElements && (empty || count > 0)) return sizes;
    if (chance(20)) return std::vector<int64_t>(dims, 2);
  }
}

c10::ScalarType Draw::type_of(char kind) {
  switch (kind) {
    case 'f':
      return narrow_ && chance(20) ? at::kDouble : float_type_;
    case 'c':
      return complex_type_;
    case 'b':
      return at::kBool;
    default:
      return chance(30) ? at::kLong : int_type_;
  }
}

Placements Draw::placements(const at::Tensor& like, bool partial, bool nonnegative) {
  Placements drawn;
  const auto partials = partials_of(like.scalar_type(), nonnegative, program_.mesh);
  const Placement reduction = chance(45) ? partials[0] : one_of(partials);
  for (size_t m = 0; m < program_.mesh.size(); ++m) {
    const int64_t choice = below(100);
    if (choice < 22 || (like.dim() == 0 && choice < 72)) {
      drawn.push_back(Replicate());
    } else if (choice < 62) {
      drawn.push_back(Shard(below(like.dim())));
    } else if (choice < 72) {
      drawn.push_back(StridedShard(below(like.dim()), between(2, 4)));
    } else {
      drawn.push_back(partial ? reduction : Replicate());
    }
  }
  return drawn;
}

int Draw::input(c10::ScalarType type, const std::vector<int64_t>& sizes, const Fill& fill, bool grad) {
  Step step;
  step.kind = Step::Kind::kInput;
  step.results = {static_cast<int>(clean_.tensors.size())};
  step.type = type;
  step.sizes = sizes;
  step.fill = fill;
  step.grad = grad && takes_gradients(type);
  const at::Tensor like = at::empty(sizes, at::TensorOptions().dtype(type));
  const bool nonnegative = fill.kind != Fill::Kind::kDistinct && (fill.kind != Fill::Kind::kUniform || fill.low >= 0);
  step.placements = placements(like, /*partial=*/true, nonnegative);
  ++inputs_;
  if (!append(std::move(step))) throw NothingFits();
  return last_results()[0];
}

int Draw::new_input(const Wish& wish) {
  // Most operands are real numbers.
  const bool real = wish.kinds.find('f') != std::string::npos && chance(wish.kinds.size() > 1 ? 70 : 100);
  const char kind = real ? 'f' : one_of(wish.kinds);
  const auto sizes = wish.sizes ? *wish.sizes : some_sizes(wish.min_dim, wish.max_dim, wish.empty);
  Fill fill;
  fill.low = std::max(wish.low, -2.0);
  fill.high = std::min(wish.high, fill.low + 4.0);
  fill.low = std::max(wish.low, std::min(fill.low, fill.high - 0.5));
  if (kind == 'b') {
    fill.kind = Fill::Kind::kFlags;
  } else if (kind == 'i') {
    fill.kind = Fill::Kind::kBelow;
    fill.below = 5;
    if (wish.low > 0) fill = {.kind = Fill::Kind::kUniform, .low = 1, .high = 4};
  } else if (wish.low < -1e3 && wish.high > 1e3 && chance(20)) {
    fill.kind = Fill::Kind::kDistinct;
  }
  return input(type_of(kind), sizes, fill, chance(65));
}

bool Draw::suits(int id, const Wish& wish) const {
  const at::Tensor& t = clean_.tensors[id];
  if (!t.defined() || wish.kinds.find(kind_of(t.scalar_type())) == std::string::npos || t.dim() < wish.min_dim ||
      t.dim() > wish.max_dim || (!wish.empty && t.numel() == 0) ||
      (wish.sizes && t.sizes() != at::IntArrayRef(*wish.sizes))) {
    return false;
  }
  if (wish.low > -kLargest || wish.high < kLargest) {
    const auto [low, high] = bounds(t);
    if (low < wish.low || high > wish.high) return false;
  }
  return !wish.also || wish.also(t);
}

int Draw::pick_recent(const std::vector<int>& ids) {
  const auto count = static_cast<int64_t>(ids.size());
  return ids[chance(60) ? count - 1 - below(std::min<int64_t>(count, 3)) : below(count)];
}

int Draw::value(const Wish& wish) {
  std::vector<int> found;
  for (size_t id = 0; id < clean_.tensors.size(); ++id) {
    if (suits(static_cast<int>(id), wish)) found.push_back(static_cast<int>(id));
  }
  const bool fresh = inputs_ < 2 ? chance(60) : inputs_ < 7 && chance(12);
  return found.empty() || fresh ? new_input(wish) : pick_recent(found);
}

int Draw::partner(int id, const std::string& kinds, double low, double high) {
  const auto sizes = sizes_of(id);
  Wish wish{.kinds = kinds, .low = low, .high = high};
  wish.also = [&](const at::Tensor& other) {
    const auto both = static_cast<int64_t>(std::min<size_t>(sizes.size(), other.dim()));
    for (int64_t i = 1; i <= both; ++i) {
      const int64_t a = sizes[sizes.size() - i];
      const int64_t b = other.size(-i);
      if (a != b && a != 1 && b != 1) return false;
    }
    return true;
  };
  std::vector<int> found;
  for (size_t other = 0; other < clean_.tensors.size(); ++other) {
    if (suits(static_cast<int>(other), wish)) found.push_back(static_cast<int>(other));
  }
  if (!found.empty() && chance(inputs_ < 7 ? 75 : 100)) return pick_recent(found);
  auto mine = sizes;
  if (chance(35)) {
    mine.erase(mine.begin(), mine.begin() + below(static_cast<int64_t>(mine.size()) + 1));
    for (auto& size : mine) size = chance(30) ? 1 : size;
  }
  wish.sizes = mine;
  return new_input(wish);
}

int Draw::indices(const std::vector<int64_t>& sizes, int64_t below, bool distinct) {
  Fill fill;
  fill.kind = distinct ? Fill::Kind::kPermutation : Fill::Kind::kBelow;
  fill.below = below;
  return input(at::kLong, sizes, fill, false);
}

std::optional<int> Draw::target(const Wish& wish) {
  std::vector<int> views, others;
  for (size_t id = 0; id < clean_.tensors.size(); ++id) {
    const at::Tensor& t = clean_.tensors[id];
    if (!suits(static_cast<int>(id), wish) || is_frozen(t) || (t.is_leaf() && t.requires_grad()) ||
        at::has_internal_overlap(t) != at::MemOverlap::No) {
      continue;
    }
    (t.is_view() ? views : others).push_back(static_cast<int>(id));
  }
  if (!views.empty() && chance(75)) return pick_recent(views);
  return others.empty() ? std::nullopt : std::optional(pick_recent(others));
}

int64_t Draw::dim_of(int id) {
  const int64_t dims = tensor(id).dim();
  return chance(70) ? below(dims) : below(dims) - dims;
}

bool Draw::is_frozen(const at::Tensor& tensor) const {
  return std::ranges::any_of(
      frozen_, [&](int id) { return clean_.tensors[id].defined() && clean_.tensors[id].is_alias_of(tensor); });
}

bool Draw::redistribute() {
  Step step;
  step.kind = Step::Kind::kRedistribute;
  const int source = value({.kinds = "fcib"});
  step.args = {ref(source)};
  step.placements = placements(tensor(source), /*partial=*/false, false);
  step.async = chance(45);
  step.results = {static_cast<int>(clean_.tensors.size())};
  return append(std::move(step));
}

bool Draw::call(const std::string& op, std::vector<Arg> args) {
  Step step;
  step.op = op;
  step.args = std::move(args);
  return append(std::move(step));
}

bool Draw::append(Step step) {
  const size_t before = clean_.tensors.size();
  const size_t others = clean_.others.size();
  const bool written = writes(step);
  const auto give_up = [&] {
    if (written) {
      rebuild();
    } else {
      forget_results(before);
      clean_.others.resize(others);
      for (auto& values : disturbed_) values.others.resize(std::min(others, values.others.size()));
      wide_.others.resize(std::min(others, wide_.others.size()));
    }
    return false;
  };
  try {
    PlainMachine clean(Twin::kClean), wide(Twin::kWide);
    clean.run_open(step, clean_, program_.values);
    if (!fits_in(step)) return give_up();
    for (size_t i = 0; i < kDisturbed.size(); ++i) {
      PlainMachine(kDisturbed[i]).run(step, disturbed_[i], program_.values);
    }
    if (narrow_) wide.run(step, wide_, program_.values);
  } catch (const std::exception&) {
    return give_up();
  }
  if (!same_in_twins(step)) return give_up();
  if (may_share(step)) {
    const auto operands = refs_of(step.args);
    frozen_.insert(operands.begin(), operands.end());
    frozen_.insert(step.results.begin(), step.results.end());
  }
  program_.steps.push_back(std::move(step));
  if (written && !flows_back()) {
    program_.steps.pop_back();
    return give_up();
  }
  return true;
}

void Draw::forget_results(size_t count) {
  clean_.tensors.resize(count);
  for (auto& values : disturbed_) values.tensors.resize(std::min(count, values.tensors.size()));
  wide_.tensors.resize(std::min(count, wide_.tensors.size()));
}

void Draw::rebuild() {
  const auto replayed = [&](Twin twin) {
    PlainMachine machine(twin);
    return run_forward(program_, machine);
  };
  clean_ = replayed(Twin::kClean);
  std::transform(kDisturbed.begin(), kDisturbed.end(), disturbed_.begin(), replayed);
  wide_ = narrow_ ? replayed(Twin::kWide) : Results();
}

bool Draw::fits_in(const Step& step) const {
  if (step.results.size() > 6) return false;
  for (const int id : step.results) {
    const at::Tensor& t = clean_.tensors[id];
    if (!t.defined() || t.numel() > kMostElements || t.dim() > kMostDims) return false;
    const auto [low, high] = bounds(t);
    if (low < -kLargest || high > kLargest) return false;
  }
  return true;
}

// A write may change every earlier value, so that all values are compared.
bool Draw::same_in_twins(const Step& step) const {
  const auto same = [&](int id) {
    const at::Tensor& t = clean_.tensors[id];
    const auto stable = [&](const Results& values) { return is_stable(t, values.tensors[id]); };
    return std::ranges::all_of(disturbed_, stable) && (!narrow_ || is_exact(t, wide_.tensors[id]));
  };
  if (!writes(step)) {
    const auto others_stable = [&](const Results& values) { return are_stable(clean_.others, values.others); };
    return std::ranges::all_of(step.results, same) && std::ranges::all_of(disturbed_, others_stable);
  }
  for (size_t id = 0; id < clean_.tensors.size(); ++id) {
    if (clean_.tensors[id].defined() && !same(static_cast<int>(id))) return false;
  }
  return true;
}

namespace {

void add_flows(Program& program, const Results& values) {
  for (size_t id = 0; id < values.tensors.size(); ++id) {
    const at::Tensor& t = values.tensors[id];
    if (t.defined() && t.requires_grad() && takes_gradients(t.scalar_type())) {
      program.flows.push_back({static_cast<int>(id), {}});
    }
  }
}

}  // namespace

// A write may destroy a value that the derivative of an earlier step needs.
bool Draw::flows_back() const {
  Program whole = program_;
  whole.flows.clear();
  add_flows(whole, clean_);
  try {
    run_plain(whole, Twin::kClean);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

std::pair<Program, Plain> Draw::finish() {
  Program whole = program_;
  add_flows(whole, clean_);
  auto flows = std::move(whole.flows);
  whole.flows.clear();
  // The last result and a few others get a gradient.
  for (int i = 0; i < 3 && !flows.empty() && (i == 0 || chance(50)); ++i) {
    const auto at = i == 0 ? static_cast<int64_t>(flows.size()) - 1 : below(static_cast<int64_t>(flows.size()));
    Flow flow = flows[at];
    flow.placements = placements(clean_.tensors[flow.id], /*partial=*/true, false);
    for (auto& placement : flow.placements) {  // a Partial gradient is a sum
      placement = placement.is_partial() ? Partial() : placement;
    }
    whole.flows.push_back(flow);
    flows.erase(flows.begin() + at);
  }
  backward_note_ = whole.flows.empty() ? "none takes a gradient" : "";
  whole.twice = !whole.flows.empty() && chance(45);
  for (;;) {
    std::string note;
    try {
      Plain plain = run_plain(whole, Twin::kClean);
      if (whole.flows.empty() || is_sound(whole, plain)) return {whole, std::move(plain)};
      note = "unstable";
    } catch (const std::exception& error) {
      if (whole.flows.empty()) throw;
      note = "plain tensors raise: " + text_of(error);
    }
    if (whole.twice) {
      whole.twice = false;
    } else {
      backward_note_ = note;
      whole.flows.clear();
    }
  }
}

}  // namespace tessera::testing
