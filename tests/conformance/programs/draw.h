// A program that is being drawn: it grows by operations that plain tensors can run and that are worth comparing.
//
//   Draw draw(seed, {2, 2});
//   const int x = draw.value({.kinds = "f", .low = 0.1});
//   draw.call("log", {ref(x)});                             // false: it was not taken
//
// What is taken gives finite values of moderate size that do not change visibly when the last bits of earlier values
// do, so comparing needs no loose tolerance (evaluate.h, Twin). The same seed and mesh draw the same program.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/conformance/programs/evaluate.h"

namespace tessera::testing {

// What a tensor must be like to be an operand.
struct Wish {
  std::string kinds = "f";        // f: floating point, c: complex, i: integer, b: bool
  double low = -1e4, high = 1e4;  // bounds of its values
  int64_t min_dim = 0, max_dim = 4;
  bool empty = true;  // may have no element
  std::optional<std::vector<int64_t>> sizes{};
  std::function<bool(const at::Tensor&)> also{};  // of tensors that exist already
};

// An operation that cannot be given operands here.
struct NothingFits : std::runtime_error {
  NothingFits() : std::runtime_error("no operand fits") {}
};

class Draw {
 public:
  Draw(uint64_t seed, std::vector<int64_t> mesh);

  // Numbers.
  int64_t below(int64_t n);
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  template <class List>
  auto one_of(const List& list) {
    return *(std::begin(list) + below(static_cast<int64_t>(std::size(list))));
  }
  double coefficient();  // a small number that all types hold

  // An operand: one that exists or a new input.
  int value(const Wish& wish);
  // One that broadcasts with `id`; of any of the kinds.
  int partner(int id, const std::string& kinds, double low = -1e4, double high = 1e4);
  // Integers in [0, below) of these sizes; alike: no two are the same (one dim).
  int indices(const std::vector<int64_t>& sizes, int64_t below, bool distinct);
  int input(c10::ScalarType type, const std::vector<int64_t>& sizes, const Fill& fill, bool grad);
  // One to be written to, rather a view; none when nothing may be written.
  std::optional<int> target(const Wish& wish);
  const at::Tensor& tensor(int id) const { return clean_.tensors.at(id); }
  std::vector<int64_t> sizes_of(int id) const { return tensor(id).sizes().vec(); }
  int64_t dim_of(int id);  // one of its dims, from either end; needs one
  std::vector<int64_t> some_sizes(int64_t min_dim, int64_t max_dim, bool empty);
  int64_t extent() { return some_sizes(1, 1, true)[0]; }
  c10::ScalarType type_of(char kind);
  bool narrow() const { return narrow_; }

  // Appends the operation; false, and nothing appended, when it cannot be run or compared.
  bool call(const std::string& op, std::vector<Arg> args);
  bool redistribute();
  const std::vector<int>& last_results() const { return program_.steps.back().results; }

  // Chooses what flows back, and gives the program with what plain tensors give.
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
  std::vector<int64_t> extents_;  // from which sizes are drawn
  bool narrow_ = false;
  c10::ScalarType float_type_ = at::kDouble, complex_type_ = at::kComplexDouble, int_type_ = at::kLong;
  std::set<int> frozen_;  // may or may not share memory with others, and are not written to
  int inputs_ = 0;
  std::string backward_note_;
};

}  // namespace tessera::testing
