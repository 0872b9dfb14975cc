// A program that is being drawn. It grows by operations that plain tensors can run and whose results may be compared.
//
//   Draw draw(seed, {2, 2});
//   const int x = draw.value({.kinds = "f", .low = 0.1});
//   draw.call("log", {ref(x)});                             // false: the call was not appended
//
// The appended operations give finite values of moderate size. These values do not change visibly if the last bits of
// earlier values change, so that no loose tolerance is needed (evaluate.h, Twin). The same seed and mesh draw the same
// program.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/conformance/programs/evaluate.h"

namespace tessera::testing {

// The conditions for an operand.
struct Wish {
  std::string kinds = "f";        // f: floating point, c: complex, i: integer, b: bool
  double low = -1e4, high = 1e4;  // bounds of its values
  int64_t min_dim = 0, max_dim = 4;
  bool empty = true;  // may have no elements
  std::optional<std::vector<int64_t>> sizes{};
  std::function<bool(const at::Tensor&)> also{};  // further condition on existing tensors
};

// Thrown if no operands fit an operation.
struct NothingFits : std::runtime_error {
  NothingFits() : std::runtime_error("no operand fits") {}
};

class Draw {
 public:
  Draw(uint64_t seed, std::vector<int64_t> mesh);

  // Random numbers.
  int64_t below(int64_t n);
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  template <class List>
  auto one_of(const List& list) {
    return *(std::begin(list) + below(static_cast<int64_t>(std::size(list))));
  }
  double coefficient();  // a small number that all types hold

  // Returns an operand: an existing tensor or a new input.
  int value(const Wish& wish);
  // Returns an operand of one of the kinds that broadcasts with `id`.
  int partner(int id, const std::string& kinds, double low = -1e4, double high = 1e4);
  // Returns integers in [0, below) of these sizes; distinct: no two are equal (one dim).
  int indices(const std::vector<int64_t>& sizes, int64_t below, bool distinct);
  int input(c10::ScalarType type, const std::vector<int64_t>& sizes, const Fill& fill, bool grad);
  // Returns a tensor to write to, preferably a view; none if no tensor may be written to.
  std::optional<int> target(const Wish& wish);
  const at::Tensor& tensor(int id) const { return clean_.tensors.at(id); }
  std::vector<int64_t> sizes_of(int id) const { return tensor(id).sizes().vec(); }
  int64_t dim_of(int id);  // one of its dims, from either end; it must have one
  std::vector<int64_t> some_sizes(int64_t min_dim, int64_t max_dim, bool empty);
  int64_t extent() { return some_sizes(1, 1, true)[0]; }
  c10::ScalarType type_of(char kind);
  bool narrow() const { return narrow_; }

  // Appends the operation. If it cannot be run or compared, returns false and appends nothing.
  bool call(const std::string& op, std::vector<Arg> args);
  bool redistribute();
  const std::vector<int>& last_results() const { return program_.steps.back().results; }

  // Chooses the results that get gradients. Returns the program and its results on plain tensors.
  std::pair<Program, Plain> finish();
  const Program& program() const { return program_; }
  const std::string& backward_note() const { return backward_note_; }

  Placements placements(const at::Tensor& like, bool partial, bool nonnegative);

 private:
  bool append(Step step);
  bool fits_in(const Step& step) const;
  bool same_in_twins(const Step& step) const;
  bool flows_back() const;
  void rebuild();
  void forget_results(size_t count);
  bool suits(int id, const Wish& wish) const;
  int new_input(const Wish& wish);
  bool is_frozen(const at::Tensor& tensor) const;
  int pick_recent(const std::vector<int>& ids);

  uint64_t state_;
  Program program_;
  Results clean_, wide_;
  std::array<Results, kDisturbed.size()> disturbed_;
  std::vector<int64_t> extents_;  // sizes are drawn from these
  bool narrow_ = false;
  c10::ScalarType float_type_ = at::kDouble, complex_type_ = at::kComplexDouble, int_type_ = at::kLong;
  std::set<int> frozen_;  // may share memory with others; never written to
  int inputs_ = 0;
  std::string backward_note_;
};

}  // namespace tessera::testing
