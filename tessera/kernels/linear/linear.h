// Matrix products with weights.
//
//   at::Tensor y = linear(x, weight, bias);      // [..., out] of x [..., in], weight [out, in], bias [out] or
//   undefined
//
// fp32 on a CPU runs through oneDNN where that is faster than at::linear on this machine, forward and both backward
// products; 16 bits in fp32, rounded once, where the processor has no instructions for them and libtorch is many times
// slower; everything else is at::linear. Which is faster is measured once per machine and kept in
// $XDG_CACHE_HOME/tessera (else ~/.cache/tessera), so that later runs and the other ranks round alike;
// TESSERA_LINEAR=onednn|aten and TESSERA_LINEAR_16=native|fp32 decide without measuring. DTensors: every dim may be
// sharded, and is computed on as it lies where one of the two operands allows (tessera::linear,
// tessera::linear_weight_gradient). Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace tessera::comm {
class Group;
}

namespace tessera::kernels {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

// What fp32 products on the CPU run on: "onednn" or "aten". Measures at the first call.
std::string_view linear_kernel_name();
// What those in kBFloat16 or kHalf are computed in: "native" or "fp32".
std::string_view linear_kernel_name(at::ScalarType type);

// Makes all ranks compute alike where their machines differ: products run on what those of the group's first rank do,
// those in fp32 on at::linear where some libtorch has no oneDNN; loops on the CPU with the vector instructions that all
// have. For the process, from now on. COLLECTIVE over the group.
void agree_on_kernels(comm::Group& group);

// What the CPU's numbers go by to the last bit: "fp32 products onednn, bf16 products
// native, fp16 products fp32, loops avx512" (avx2, plain).
std::string describe_cpu_kernels();

// a [m, k] times b [n, k] transposed: [m, n]. Not differentiable, of plain tensors. Either may be a transposed view.
at::Tensor product_nt(const at::Tensor& a, const at::Tensor& b);

}  // namespace tessera::kernels
