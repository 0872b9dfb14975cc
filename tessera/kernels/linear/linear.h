// Linear layers: y = x weight^T + bias.
//
//   at::Tensor y = linear(x, weight, bias);  // x [..., in], weight [out, in], bias [out] or undefined: y [..., out]
//
// fp32 on a CPU: forward and both backward products run through oneDNN where oneDNN is faster than at::linear on this
// machine. 16 bits on a CPU: where the processor has no instructions for the dtype and libtorch is many times slower,
// products are computed in fp32 and rounded once. All other tensors run at::linear.
//
// The library measures once per machine which kernel is faster and stores the result in $XDG_CACHE_HOME/tessera (else
// ~/.cache/tessera), so that later runs and other ranks on the machine round in the same way. The environment variables
// TESSERA_LINEAR=onednn|aten and TESSERA_LINEAR_16=native|fp32 set the kernel without a measurement.
//
// DTensors: every dim may be sharded. If the placements of x and weight do not fit one of the sharding strategies, an
// operand is redistributed first (operations tessera::linear, tessera::linear_weight_gradient). Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace tessera::comm {
class Group;
}

namespace tessera::kernels {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

// Returns the kernel that computes fp32 products on the CPU: "onednn" or "aten". The first call measures which kernel
// is faster, unless the choice is already set or stored (see onednn_is_faster()).
std::string_view linear_kernel_name();
// The compute dtype of products in kBFloat16 or kHalf on the CPU: "native" or "fp32".
std::string_view linear_kernel_name(at::ScalarType type);

// Makes all ranks round in the same way on different machines. All ranks use the product kernels of the group's first
// rank; fp32 products use at::linear where the libtorch of some rank has no oneDNN. The loops on the CPU use the vector
// instructions that all processors of the group have. The setting holds for the whole process, from this call on.
// COLLECTIVE over the group.
void synchronize_kernel_choices(comm::Group& group);

// Returns a text with all choices that can change the last bits of CPU results: "fp32 products onednn, bf16 products
// native, fp16 products fp32, loops avx512" (or loops avx2, plain).
std::string describe_cpu_kernels();

// The product of a [m, k] and the transpose of b [n, k]: [m, n]. Plain tensors, not differentiable. a and b may be
// transposed views.
at::Tensor product_nt(const at::Tensor& a, const at::Tensor& b);

}  // namespace tessera::kernels
