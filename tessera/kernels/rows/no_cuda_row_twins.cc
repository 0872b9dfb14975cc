// Builds without nvcc, or against a libtorch without CUDA: its operations are called one by one there.
#include "tessera/base/error.h"
#include "tessera/kernels/rows/row_twins.h"

namespace tessera::kernels::cuda {
namespace {

[[noreturn]] void raise_no_twins() {
  raise(ErrorKind::kInternal, "[kernels.cuda] this build has no CUDA kernels of its own");
}

}  // namespace

bool has_row_twins(at::ScalarType) { return false; }
at::Tensor gate(Gate, const at::Tensor&, const at::Tensor&) { raise_no_twins(); }
std::tuple<at::Tensor, at::Tensor> gate_backward(Gate, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  raise_no_twins();
}
std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor&, const at::Tensor&, double, bool) { raise_no_twins(); }
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                     const at::Tensor&) {
  raise_no_twins();
}
at::Tensor rotary(const at::Tensor&, const at::Tensor&, const at::Tensor&, float) { raise_no_twins(); }
at::Tensor cross_entropy_rows(const at::Tensor&, const at::Tensor&, bool) { raise_no_twins(); }

}  // namespace tessera::kernels::cuda
