// Runs programs on plain tensors and on DTensors.
//
//   const Plain plain = run_plain(program, Twin::kClean);     // values, gradients, second gradients
//
// Four twins of a program tell whether it may be compared at all: kNoisy disturbs every value that is not exact in
// its last bits, kContrary the other way, so that what sorts, compares or divides where rounding decides shows up as
// different in one of them; kWide computes narrow types (bf16, f16, f32, c64) in double precision, and a program with
// such types must give the same to the bit.
// What PyTorch leaves open is no program: plain tensors refuse to write to memory that the same step reads in another
// order, to what may be shared or not, and without a derivative to what takes one.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tests/conformance/programs/program.h"
#include "tests/conformance/shares.h"

namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

// What the results are, by id; and what operations returned that is no tensor, in the order of the steps.
struct Results {
  Tensors tensors;
  std::vector<c10::IValue> others;
};

enum class Twin { kClean, kNoisy, kContrary, kWide };
constexpr std::array<Twin, 2> kDisturbed{Twin::kNoisy, Twin::kContrary};

class Machine {
 public:
  virtual ~Machine() = default;
  virtual at::Tensor input(const Step& step, uint64_t seed) = 0;
  virtual at::Tensor redistribute(const at::Tensor& tensor, const Step& step) = 0;
  virtual c10::ScalarType type_of(c10::ScalarType asked) const { return asked; }
  // May throw: a step that is not to be compared.
  virtual void before(const Step&, const Results&) {}
  virtual void after(const Step&, const Results&, const Tensors& /*arguments*/) {}
  void run(const Step& step, Results& values, uint64_t seed);
  // Of a call, counts the results and gives them the next ids.
  void run_open(Step& step, Results& values, uint64_t seed);
};

class PlainMachine final : public Machine {
 public:
  explicit PlainMachine(Twin twin) : twin_(twin) {}
  at::Tensor input(const Step& step, uint64_t seed) override;
  at::Tensor redistribute(const at::Tensor& tensor, const Step& step) override;
  c10::ScalarType type_of(c10::ScalarType asked) const override;
  void before(const Step& step, const Results& values) override;
  void after(const Step& step, const Results& values, const Tensors& arguments) override;

 private:
  Twin twin_;
  Tensors frozen_;
};

class MeshMachine final : public Machine {
 public:
  explicit MeshMachine(MeshPtr mesh) : mesh_(std::move(mesh)) {}
  at::Tensor input(const Step& step, uint64_t seed) override;
  at::Tensor redistribute(const at::Tensor& tensor, const Step& step) override;

 private:
  MeshPtr mesh_;
};

// Gradients that flow into the results named by the program, plain, from its seed.
Tensors plain_flows(const Program& program, const Results& values);

struct Gradients {
  Tensors first;         // one an input with `grad`, in order; undefined where nothing flows
  Tensors second_flows;  // plain, into `first`; undefined where there is no second derivative
  Tensors second;
};
// `place` brings a flow to where it shall lie; identity for plain tensors.
Tensors gradients(const Program& program, const Results& values, const Tensors& flows, bool create_graph);
Tensors second_gradients(const Program& program, const Results& values, const Tensors& first, const Tensors& flows);
// Plain flows for second derivatives; undefined for gradients that depend on no input.
Tensors plain_second_flows(const Program& program, const Tensors& first);
// Whether what flows back through that gradient of plain tensors is zero everywhere, as through zeros that a write put
// there.
bool depends_in_vain(const Program& program, size_t gradient);
bool is_zero(const at::Tensor& tensor);  // or undefined

struct Plain {
  Results values;
  Tensors flows;
  Gradients gradients;
};
// Throws what the operations throw.
Plain run_plain(const Program& program, Twin twin);
Results run_forward(const Program& program, Machine& machine);

bool has_narrow(const Program& program);     // an input or a conversion
bool takes_gradients(c10::ScalarType type);  // floating point and complex
const c10::OperatorHandle& find_op(const std::string& name);
bool writes(const Step& step);     // to an argument
bool may_share(const Step& step);  // what it gives is its operand's memory or a copy, as the layout has it

// What an exception says, without libtorch's backtrace, which takes long to write.
std::string text_of(const std::exception& error);

// Equal within a tolerance relative to 1 + |wanted|, on whatever devices; infinities and NaNs alike. Empty when so,
// else what differs.
std::string difference(const at::Tensor& found, const at::Tensor& wanted, double tolerance);

}  // namespace tessera::testing
