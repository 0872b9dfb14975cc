// Whether fp32 products of this machine go through oneDNN, and the call that does it.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <string>

namespace tessera::detail {

// x [m, k] times weight [n, k] transposed, plus bias where defined. Plain fp32 CPU tensors, strided as they may be.
at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// The choice of a UseLinearKernel, else the one that ranks agreed on, else of TESSERA_LINEAR, else the one kept for
// this machine, else measured now and kept.
bool onednn_is_faster();
bool has_onednn();
// The choice of this process from now on.
void set_linear_choice(bool onednn);

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

// Reads the choice kept in `file`; where there is none, measures, and keeps what it finds unless another process was
// first: then that one's choice counts. A folder that cannot be written only loses the keeping.
bool kept_choice(const std::filesystem::path& file, bool (*measure)());

}  // namespace tessera::detail
