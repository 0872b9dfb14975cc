#include "tessera/comm/backends/local_reduction.h"

#include <ATen/ATen.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include <array>

namespace tessera::comm {
namespace {

void accumulate(at::Tensor into, const at::Tensor& part, ReduceOp op) {
  if (op == ReduceOp::kMin) {
    at::minimum_out(into, into, part.to(into.scalar_type()));
  } else if (op == ReduceOp::kMax) {
    at::maximum_out(into, into, part.to(into.scalar_type()));
  } else if (op == ReduceOp::kProduct) {
    into.mul_(part);
  } else {  // sum, and average, which reduce_parts() divides at the end
    into.add_(part);
  }
}

}  // namespace

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

bool can_reduce(c10::ScalarType type, ReduceOp op) {
  const bool floating = type == at::kFloat || type == at::kDouble || is_half(type);
  const bool integer = type == at::kByte || type == at::kChar || type == at::kInt || type == at::kLong;
  return floating || (integer && op != ReduceOp::kAvg);
}

const char* reducible_types(ReduceOp op) {
  return op == ReduceOp::kAvg ? "float32, float64, bfloat16, float16"
                              : "float32, float64, bfloat16, float16, int32, int64, int8 or uint8";
}

// A conjugated view cannot be reduced as a real tensor, because at::view_as_real() refuses it.
bool reduces_as_real(const at::Tensor& tensor, ReduceOp op) {
  return tensor.is_complex() && !tensor.is_conj() && (op == ReduceOp::kSum || op == ReduceOp::kAvg);
}

c10d::ReduceOp::RedOpType to_c10d_op(ReduceOp op) {
  using RedOpType = c10d::ReduceOp::RedOpType;
  // kCarried has c10d's operation for each ReduceOp, in the order of ReduceOp's enumerators.
  constexpr std::array kCarried = {RedOpType::SUM, RedOpType::AVG, RedOpType::MIN, RedOpType::MAX, RedOpType::PRODUCT};
  return kCarried.at(static_cast<size_t>(op));
}

// Computes 128 Ki elements at a time, so that the accumulator stays in the cache while all parts are added.
void reduce_parts(const at::Tensor& output, const at::Tensor& parts, ReduceOp op) {
  constexpr int64_t kPiece = 1 << 17;
  const int64_t count = parts.size(0), length = parts.size(1);
  const bool through_float = is_half(output.scalar_type());
  at::Tensor sum;
  if (through_float) sum = at::empty({std::min(length, kPiece)}, output.options().dtype(at::kFloat));
  for (int64_t begin = 0; begin < length; begin += kPiece) {
    const int64_t size = std::min(kPiece, length - begin);
    at::Tensor target = output.narrow(0, begin, size);
    at::Tensor piece = through_float ? sum.narrow(0, 0, size) : target;
    piece.copy_(parts[0].narrow(0, begin, size));
    for (int64_t i = 1; i < count; ++i) accumulate(piece, parts[i].narrow(0, begin, size), op);
    if (op == ReduceOp::kAvg) piece.div_(static_cast<double>(count));
    if (through_float) target.copy_(piece);
  }
}

}  // namespace tessera::comm
