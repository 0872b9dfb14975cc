// Runs programs on plain tensors and on DTensors.
//
//   const Plain plain = run_plain(program, Twin::kClean);     // values, gradients, second gradients
//
// Four twins of a program decide whether its results may be compared. kNoisy changes the last bits of every value that
// is not exact; kContrary changes them in the other direction. If rounding decides a sort, a comparison or a division,
// one of the two twins gives another result. kWide computes narrow types (bf16, f16, f32, c64) in double precision; a
// program with such types must give the same results to the bit. Steps whose result PyTorch does not define are refused
// on plain tensors: a write to memory that the same step reads in another order, a write to memory that may or may not
// be shared, and a write without a derivative to a tensor that takes one.
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

// The results by id, and the results that are no tensors, in the order of the steps.
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
  // May throw if the step must not be compared.
  virtual void before(const Step&, const Results&) {}
  virtual void after(const Step&, const Results&, const Tensors& /*arguments*/) {}
  void run(const Step& step, Results& values, uint64_t seed);
  // Runs a call, counts its results and gives them the next ids.
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

// Returns the gradients of the results that the program names, as plain tensors, from the program's seed.
Tensors plain_flows(const Program& program, const Results& values);

struct Gradients {
  Tensors first;         // one per input with `grad`, in order; undefined without a gradient
  Tensors second_flows;  // plain, for `first`; undefined without a second derivative
  Tensors second;
};
// Returns the gradients of the inputs. `flows` are the gradients of the results, in the placements of the program for
// DTensors.
Tensors gradients(const Program& program, const Results& values, const Tensors& flows, bool create_graph);
Tensors second_gradients(const Program& program, const Results& values, const Tensors& first, const Tensors& flows);
// Returns plain incoming gradients for second derivatives. They are undefined for gradients that depend on no input.
Tensors plain_second_flows(const Program& program, const Tensors& first);
// Whether the second derivatives through this gradient of plain tensors are zero everywhere, as after a write of zeros.
bool depends_in_vain(const Program& program, size_t gradient);
bool is_zero(const at::Tensor& tensor);  // or undefined

struct Plain {
  Results values;
  Tensors flows;
  Gradients gradients;
};
// Passes on the exceptions of the operations.
Plain run_plain(const Program& program, Twin twin);
Results run_forward(const Program& program, Machine& machine);

bool has_narrow(const Program& program);     // in an input or a conversion
bool takes_gradients(c10::ScalarType type);  // floating point and complex
const c10::OperatorHandle& find_op(const std::string& name);
bool writes(const Step& step);     // to an argument
bool may_share(const Step& step);  // its result is a view or a copy, depending on the layout

// Returns the text of an exception without libtorch's backtrace, which takes long to format.
std::string text_of(const std::exception& error);

// Compares within a tolerance relative to 1 + |wanted|, on any devices. Infinities and NaNs must be equal. Returns the
// difference as text; empty if there is none.
std::string difference(const at::Tensor& found, const at::Tensor& wanted, double tolerance);

}  // namespace tessera::testing
