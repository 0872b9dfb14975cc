// A linear head in chunks of rows: shared by the cross entropy and the log-probs of hidden states.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::kernels {

// The index (in the flattened labels) of the first label that is neither kIgnoredLabel nor in [0, classes); -1: every
// label is valid. labels: int64, any shape. Waits for the labels' device.
int64_t first_wrong_label(const at::Tensor& labels, int64_t classes);

// The rows of a call whose label is not kIgnoredLabel ("labelled rows").
class LabelledRows {
 public:
  explicit LabelledRows(const at::Tensor& labels);    // labels: int64 [N]
  at::Tensor of(const at::Tensor& values) const;      // [N, ...] -> the labelled rows; the tensor itself where all are
  at::Tensor to_all(const at::Tensor& values) const;  // back to [N, ...]; 0 in the other rows

 private:
  at::Tensor kept_;
  int64_t count_;
};

struct RowChunk {
  int64_t begin, rows;
};
// Splits rows into chunks of nearly equal size, each at most chunk_bytes at row_bytes per row, and at least one row.
// Nearly equal sizes avoid a small matrix product for the last chunk.
std::vector<RowChunk> row_chunks(int64_t rows, int64_t row_bytes, int64_t chunk_bytes);

// Replaces logits by softcap * tanh(logits / softcap) in place; softcap 0: unchanged. Returns the derivative of the cap
// where wants_slope is true and softcap is positive, else an undefined tensor.
at::Tensor cap_logits(at::Tensor& logits, double softcap, bool wants_slope);

// Computes grad_weight [V, d] += gradient [rows, V]^T hidden [rows, d]. On the CPU this is done in blocks of the head's
// rows, so that no second tensor of the head's size is needed.
void add_head_gradient(const at::Tensor& grad_weight, const at::Tensor& gradient, const at::Tensor& hidden);

}  // namespace tessera::kernels
