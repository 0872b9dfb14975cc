// The choice between two kernels for products on this machine: fp32 products run through oneDNN or ATen; 16-bit
// products run in their own dtype, or in fp32 where the processor has no instructions for the dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>

namespace tessera::kernels {

// Returns x [m, k] times the transpose of weight [n, k], plus bias [n] where defined, computed by oneDNN. Plain fp32
// CPU tensors with any strides.
at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// Returns whether fp32 products run through oneDNN. The first of these decides: a LinearKernelGuard of this thread; the
// choice that ranks agreed on; TESSERA_LINEAR; the choice stored for this machine; a measurement, which is then stored.
bool onednn_is_faster();
bool has_onednn();
// Sets whether fp32 products of this process run through oneDNN from now on.
void set_linear_choice(bool onednn);

// Returns whether products in kBFloat16 or kHalf run in fp32, with one rounding at the end. The first of these decides:
// the choice that ranks agreed on; TESSERA_LINEAR_16 (native or fp32); the choice stored for this machine; a
// measurement, which is then stored.
bool fp32_is_faster_for(at::ScalarType type);
// Returns whether `operand` is a 16-bit CPU tensor whose products run in fp32.
bool runs_in_fp32(const at::Tensor& operand);
// Sets whether products of this process in `type` run in fp32 from now on.
void set_fp32_choice(at::ScalarType type, bool fp32);

// While the object lives, fp32 products of this thread run through oneDNN if `onednn` is true and through ATen if it is
// false, regardless of which is faster. Error kConfig if `onednn` is true and libtorch has no oneDNN. Objects may be
// nested.
class LinearKernelGuard {
 public:
  explicit LinearKernelGuard(bool onednn);
  ~LinearKernelGuard();
  LinearKernelGuard(const LinearKernelGuard&) = delete;
  LinearKernelGuard& operator=(const LinearKernelGuard&) = delete;

 private:
  std::optional<bool> before_;
};

// The names of the two kernels of a choice, in files and environment variables.
struct KernelChoiceNames {
  std::string_view yes, no;
};
// Returns which of two kernels is to be used: true for the kernel names.yes, false for names.no. The name of the kernel
// is read from `file`. If `file` does not exist, calls measure(), whose result has the same meaning, and stores the
// name of the measured kernel in `file`. If another process stores a name first, that name decides. If the name cannot
// be stored, the result of measure() is returned all the same.
bool stored_choice(const std::filesystem::path& file, const KernelChoiceNames& names,
                   const std::function<bool()>& measure);

}  // namespace tessera::kernels
