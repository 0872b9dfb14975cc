// Arguments for every operation of ops.txt, on plain CPU tensors. The conformance tests call the operations with them.
//
//   table.add("aten::mm", [](SampleMaker& make) {                       // in samples/matmul.cc
//     make.add({{"self", make.normal({make.n, 6})}, {"mat2", make.normal({6, make.m})}});
//   });
//
// To add a sample, write it into the family's file in samples/. A sample covers all overloads of a name, with in-place
// and out= forms, unless a form is listed under its full name ("aten::sum.dim_IntList"). Arguments are set by the
// schema's names. The other arguments take their defaults, and an out= argument is made from the result. Pointwise
// operations need no entry: their samples come from the schema (samples/pointwise.cc).
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

struct Sample {
  c10::OperatorHandle op;
  std::string label;                // "aten::mm n=9 m=6 #0"
  std::vector<c10::IValue> args{};  // one per argument of the schema; none for out=
  double tolerance = 1e-9;
  bool gradient = true;           // false: gradients are not compared although they exist
  bool random = false;            // values are drawn; the reference is a mesh of one rank
  bool undefined_values = false;  // empty(): only shapes and placements are compared
  bool may_refuse = false;        // composite with a write: may refuse as a write may
  size_t flowing = 99;            // results with gradients; the others are statistics
  bool plan_only = false;         // no CPU kernel: only the rule's plan is compared
  // Names of arguments that stay replicated, for example learning rates and counters.
  std::vector<std::string> whole{};
  // Results that are not unique are compared through this function: U diag(S) V instead of U, S, V.
  std::function<Tensors(const std::vector<c10::IValue>& args, const Tensors& results)> canonical{};
  // Whether the same arguments give the same results each time.
  bool has_values() const { return !random && !undefined_values && !plan_only; }
};

using NamedArguments = std::vector<std::pair<std::string, c10::IValue>>;

class SampleMaker {
 public:
  // n: number of rows, which varies: 0, 1, k - 1, k + 1, 2k + 1 for k ranks. m: another size.
  SampleMaker(c10::OperatorHandle op, int64_t n, int64_t m);

  const int64_t n;
  const int64_t m;
  const int64_t k;  // a small size: 4 if m is a multiple of 4, so that all sizes are; else 3
  const c10::FunctionSchema& schema() const { return op_.schema(); }
  const std::string& overload() const { return op_.operator_name().overload_name; }
  bool has(const std::string& argument) const;

  // Adds a sample. Throws if the schema has no argument of a given name, or if an argument without default is missing.
  Sample& add(const NamedArguments& arguments);

  // Returns tensors of doubles that are the same at every run.
  at::Tensor normal(at::IntArrayRef shape);
  at::Tensor uniform(double low, double high, at::IntArrayRef shape);
  at::Tensor integers(int64_t low, int64_t high, at::IntArrayRef shape);  // in [low, high)
  at::Tensor flags(at::IntArrayRef shape);
  at::Tensor complex(at::IntArrayRef shape);
  at::Tensor distinct(at::IntArrayRef shape);          // no two equal values: for sort, max, median
  at::Tensor well_conditioned(at::IntArrayRef shape);  // square matrices, diagonally dominant
  at::Tensor positive_definite(at::IntArrayRef shape);

  std::vector<Sample> take() { return std::move(samples_); }

 private:
  c10::OperatorHandle op_;
  std::vector<Sample> samples_;
  uint64_t seed_;
  at::Generator next_generator();
};

using SampleBuilder = std::function<void(SampleMaker&)>;

class SampleTable {
 public:
  SampleTable();
  void add(const std::string& name, SampleBuilder builder);
  void add(std::initializer_list<const char*> names, const SampleBuilder& builder);
  bool contains(const std::string& name) const;  // whether a builder serves this operation
  // Returns the samples of an operation like "aten::add_.Tensor"; empty if it has none.
  std::vector<Sample> samples(const std::string& name, int64_t n, int64_t m) const;

 private:
  const SampleBuilder* find(const c10::OperatorName& name) const;
  std::unordered_map<std::string, SampleBuilder> builders_;
};

const SampleTable& sample_table();

// One line of ops.txt.
struct ListedOp {
  std::string name;
  std::string group;
};
const std::vector<ListedOp>& listed_ops();
// Whether TESSERA_OP is unset or is a part of the name. The variable selects few operations.
bool is_asked_for(const std::string& op);
std::vector<std::string> op_groups();

// The functions of the files in samples/.
void add_matmul_samples(SampleTable& table);
void add_reduction_samples(SampleTable& table);
void add_view_samples(SampleTable& table);
void add_tensor_samples(SampleTable& table);
void add_index_samples(SampleTable& table);
void add_pointwise_samples(SampleTable& table);
void add_foreach_samples(SampleTable& table);
void add_linalg_samples(SampleTable& table);
void add_fft_samples(SampleTable& table);
void add_image_samples(SampleTable& table);
void add_norm_layer_samples(SampleTable& table);
void add_loss_samples(SampleTable& table);
void add_attention_samples(SampleTable& table);
void add_random_samples(SampleTable& table);

}  // namespace tessera::testing
