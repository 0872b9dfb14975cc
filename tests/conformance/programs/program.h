// A program: inputs, and operations on inputs and earlier results. Its text form:
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
// Operations have the names of aten, or the full names of our operations (tessera::kernels::swiglu). Arguments follow
// the schema; trailing defaults are left out. `values` is the seed of the inputs' values. `backward` names results with
// the placements of their gradients. `twice` asks for second derivatives. The text is complete: the program runs in the
// same way everywhere.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "tessera/dtensor/tensor/placement.h"

namespace tessera::testing {

// An argument, as in the text form.
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

// The values of an input.
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
  Placements placements;  // of an input, or of the result of redistribute
  // kCall
  std::string op;         // "add.Tensor"
  std::vector<Arg> args;  // kRedistribute: the tensor
  bool async = false;     // kRedistribute
};

// A gradient of a result.
struct Flow {
  int id;
  Placements placements;
};

struct Program {
  std::vector<int64_t> mesh;
  uint64_t values = 0;
  std::vector<Step> steps;
  std::vector<Flow> flows;  // empty: no backward
  bool twice = false;

  int value_count() const;  // one more than the largest id
  int calls() const;        // operations and redistributions
};

std::string to_text(const Program& program);
std::string to_text(const Step& step);
// Throws std::runtime_error with the number of the wrong line.
Program parse_program(const std::string& text);
const char* short_name(c10::ScalarType type);  // "f64"

// Returns the ids in an argument list.
std::vector<int> refs_of(const std::vector<Arg>& args);

}  // namespace tessera::testing
