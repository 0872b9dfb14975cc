// A program: tensors that are made, and operations on them, each on results of earlier ones. As text:
//
//   mesh 2 2
//   values 77
//   %0 = input f64 [5, 3] uniform -2 2 (S(0), R) grad
//   %1 = input i64 [4] below 5 (R, S(0))
//   %2 = index_select(%0, 0, %1)
//   %3 = redistribute(%2, (R, S(1))) async
//   %4 = add_.Tensor(%3, %2, 0.5)
//   backward %4 (P(sum), R)
//   twice
//
// Operations have the names of aten (of ours the full ones, tessera::kernels::swiglu) and the arguments of its schemas,
// those at the end with their defaults left out. `values` is the seed of what the inputs hold, `backward` names results
// and how the gradients that flow into them lie, `twice` asks for second derivatives. The text says everything: it runs
// alike everywhere.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "tessera/dtensor/tensor/placement.h"

namespace tessera::testing {

// What an argument is, as text has it.
struct Arg {
  struct None {};
  struct Ref {
    int id;
  };
  struct Dtype {
    c10::ScalarType type;
  };
  using List = std::vector<Arg>;
  std::variant<None, Ref, int64_t, double, bool, std::string, Dtype, List> value;
};
inline Arg none() { return {Arg::None{}}; }
inline Arg ref(int id) { return {Arg::Ref{id}}; }
inline Arg num(int64_t n) { return {n}; }
inline Arg num(double x) { return {x}; }
inline Arg flag(bool b) { return {b}; }
inline Arg word(std::string text) { return {std::move(text)}; }
inline Arg type_arg(c10::ScalarType type) { return {Arg::Dtype{type}}; }
Arg refs(const std::vector<int>& ids);
Arg ints(const std::vector<int64_t>& values);

// What an input holds.
struct Fill {
  enum class Kind { kUniform, kDistinct, kBelow, kPermutation, kFlags };
  Kind kind = Kind::kUniform;
  double low = -2, high = 2;  // kUniform: multiples of 1/64 (of 1/4 in narrow types) in [low, high]
  int64_t below = 1;          // kBelow: integers in [0, below)
};

struct Step {
  enum class Kind { kInput, kCall, kRedistribute };
  Kind kind = Kind::kCall;
  std::vector<int> results;
  // kInput
  c10::ScalarType type = c10::ScalarType::Double;
  std::vector<int64_t> sizes;
  Fill fill;
  bool grad = false;
  Placements placements;  // of an input; of what redistribute gives
  // kCall
  std::string op;         // "add.Tensor"
  std::vector<Arg> args;  // of kRedistribute: the tensor
  bool async = false;     // kRedistribute
};

// A gradient that flows into a result.
struct Flow {
  int id;
  Placements placements;
};

struct Program {
  std::vector<int64_t> mesh;
  uint64_t values = 0;
  std::vector<Step> steps;
  std::vector<Flow> flows;  // none: no backward
  bool twice = false;

  int value_count() const;  // one more than the largest id
  int calls() const;        // operations and redistributions
};

std::string to_text(const Program& program);
std::string to_text(const Step& step);
// Throws std::runtime_error naming the line.
Program parse_program(const std::string& text);
const char* short_name(c10::ScalarType type);  // "f64"

// The ids that an argument list refers to.
std::vector<int> refs_of(const std::vector<Arg>& args);

}  // namespace tessera::testing
