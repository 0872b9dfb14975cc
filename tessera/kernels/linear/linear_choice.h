// Which of two ways products of this machine go: those in fp32 through oneDNN or ATen, those in 16 bits in their dtype
// or in fp32, where the processor has no instructions for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>

namespace tessera::kernels {

// x [m, k] times weight [n, k] transposed, plus bias where defined. Plain fp32 CPU tensors, strided as they may be.
at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// The choice of a UseLinearKernel, else the one that ranks agreed on, else of TESSERA_LINEAR, else the one kept for
// this machine, else measured now and kept.
bool onednn_is_faster();
bool has_onednn();
// The choice of this process from now on.
void set_linear_choice(bool onednn);

// Whether products in kBFloat16 or kHalf are faster with operands widened to fp32, the result being rounded once. The
// choice that ranks agreed on, else of TESSERA_LINEAR_16 (native, fp32), else the one kept for this machine, else
// measured now and kept.
bool fp32_is_faster_for(at::ScalarType type);
bool runs_in_fp32(const at::Tensor& operand);  // of 16 bits on the CPU, where that is faster
// The choice of this process from now on.
void set_fp32_choice(at::ScalarType type, bool fp32);

// While one lives, products of this thread go through oneDNN, or do not, whatever is faster. Error kConfig where
// libtorch has no oneDNN. May be nested.
class UseLinearKernel {
 public:
  explicit UseLinearKernel(bool onednn);
  ~UseLinearKernel();
  UseLinearKernel(const UseLinearKernel&) = delete;
  UseLinearKernel& operator=(const UseLinearKernel&) = delete;

 private:
  std::optional<bool> before_;
};

// What a choice is called, in files and in the environment.
struct ChoiceNames {
  std::string_view yes, no;
};
// Reads the choice kept in `file`; where there is none, measures, and keeps what it finds unless another process was
// first: then that one's choice counts. A folder that cannot be written only loses the keeping.
bool kept_choice(const std::filesystem::path& file, const ChoiceNames& names, const std::function<bool()>& measure);

}  // namespace tessera::kernels
