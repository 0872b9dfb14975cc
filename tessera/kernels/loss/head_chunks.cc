#include "tessera/kernels/loss/head_chunks.h"

#include <algorithm>

#include "tessera/base/ignored_label.h"
#include "tessera/kernels/linear/linear.h"

namespace tessera::kernels {
namespace {

constexpr int64_t kHeadBlockRows = 8192;  // rows of the head whose gradient is one product

}  // namespace

int64_t first_wrong_label(const at::Tensor& labels, int64_t classes) {
  const auto wrong = labels.ne(kIgnoredLabel).logical_and(labels.lt(0).logical_or(labels.ge(classes)));
  if (wrong.numel() == 0 || !wrong.any().item<bool>()) return -1;
  return wrong.flatten().nonzero()[0].item<int64_t>();
}

LabelledRows::LabelledRows(const at::Tensor& labels)
    : kept_(at::nonzero(labels.ne(kIgnoredLabel)).squeeze(1)), count_(labels.size(0)) {}

at::Tensor LabelledRows::of(const at::Tensor& values) const {
  return kept_.size(0) == count_ ? values : values.index_select(0, kept_);
}

at::Tensor LabelledRows::to_all(const at::Tensor& values) const {
  if (kept_.size(0) == count_) return values;
  auto shape = values.sizes().vec();
  shape[0] = count_;
  return at::zeros(shape, values.options()).index_copy_(0, kept_, values);
}

std::vector<RowChunk> row_chunks(int64_t rows, int64_t row_bytes, int64_t chunk_bytes) {
  const int64_t chunk_rows = std::clamp<int64_t>(chunk_bytes / row_bytes, 1, std::max<int64_t>(1, rows));
  const int64_t count = (rows + chunk_rows - 1) / chunk_rows;
  std::vector<RowChunk> chunks;
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    // The remainder is spread over the chunks, so that their sizes differ by at most one row.
    const int64_t begin = rows * chunk / count, end = rows * (chunk + 1) / count;
    chunks.push_back({begin, end - begin});
  }
  return chunks;
}

// The derivative of softcap * tanh(x / softcap) is 1 - tanh(x / softcap)^2.
at::Tensor cap_logits(at::Tensor& logits, double softcap, bool wants_slope) {
  if (softcap <= 0) return {};
  logits.div_(softcap).tanh_();
  const auto slope = wants_slope ? logits.square().neg_().add_(1) : at::Tensor();
  logits.mul_(softcap);
  return slope;
}

// The gradient of the head is computed in blocks of kHeadBlockRows rows of the head by product_nt, which selects the
// faster kernel on a CPU. So the temporary result has the size of one block only.
void add_head_gradient(const at::Tensor& grad_weight, const at::Tensor& gradient, const at::Tensor& hidden) {
  if (!grad_weight.is_cpu() && grad_weight.scalar_type() == gradient.scalar_type()) {
    grad_weight.addmm_(gradient.t(), hidden);  // adds in place
    return;
  }
  for (int64_t begin = 0; begin < gradient.size(1); begin += kHeadBlockRows) {
    const int64_t rows = std::min(kHeadBlockRows, gradient.size(1) - begin);
    grad_weight.narrow(0, begin, rows).add_(product_nt(gradient.narrow(1, begin, rows).t(), hidden.t()));
  }
}

}  // namespace tessera::kernels
