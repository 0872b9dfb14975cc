#include "tessera/parallel/data_parallel/flat_gradients.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "tessera/parallel/data_parallel/data_parallel_state.h"

namespace tessera {

void FlatGradients::open(FlatLayout layout, c10::ScalarType dtype, c10::Device device, c10::Allocator* memory) {
  layout_ = std::move(layout);
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  const size_t count = layout_.entries.size();
  flags_offset_ = layout_.append_extra(static_cast<int64_t>(count), itemsize) / itemsize;
  filled_.assign(count, false);
  complete_ = false;
  buffer_ = pool_->empty(layout_.ranks * layout_.part_bytes / itemsize, dtype, device, memory);
}

void FlatGradients::add(size_t index, const at::Tensor& gradient) {
  const c10::NoGradGuard no_grad;
  pack_gradient(layout_, index, gradient, buffer_, filled_[index]);
  filled_[index] = true;
  complete_ = false;
}

// On an accelerator, if every gradient is defined, one packing kernel writes all gradients, the padding and the flags.
// It writes them into buffer_ if buffer_ has no gradient yet, otherwise into a scratch buffer, which is then added to
// buffer_. This addition reads all of buffer_, so complete_ must be true: memory of buffer_ that was never written
// holds arbitrary values. In every other case the gradients are added one by one.
void FlatGradients::add_all(std::vector<at::Tensor>&& gradients) {
  const c10::NoGradGuard no_grad;
  const auto is_there = [](const at::Tensor& gradient) { return gradient.defined(); };
  const bool first = std::ranges::find(filled_, true) == filled_.end();
  const bool at_once = !buffer_.is_cpu() && std::ranges::all_of(gradients, is_there);
  if (at_once && (first || complete_)) {
    const at::Tensor packed = first ? buffer_ : pool_->empty(buffer_.numel(), buffer_.scalar_type(), buffer_.device());
    pack_gradients(layout_, gradients, static_cast<int64_t>(filled_.size()), packed, fill_);
    if (!first) buffer_.add_(packed);  // flags add up, too: every value above zero means "used"
    filled_.assign(filled_.size(), true);
    complete_ = true;
    return gradients.clear();
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) add(i, gradients[i]);
    gradients[i].reset();
  }
}

void FlatGradients::complete() {
  zero_unfilled(layout_, buffer_, filled_);
  const int64_t part = buffer_.numel() / layout_.ranks;
  for (auto run = filled_.begin(); run != filled_.end();) {  // one fill for each run of filled entries
    const auto end = std::find(run, filled_.end(), !*run);
    const int64_t first = flags_offset_ + (run - filled_.begin());
    if (*run) buffer_.as_strided({layout_.ranks, end - run}, {part, 1}, first).fill_(1);
    run = end;
  }
}

// Gradients are divided after the sum over ranks (in unpack()), because the result of a reduce-scatter has fewer
// elements to divide than its input. The sum of float16 gradients could overflow, so close() divides them by one factor
// of `divide` (fp16_pre_divisor) before the sum, and unpack() by the other factor. The flags after flags_offset_ are
// not divided.
at::Tensor FlatGradients::close(double divide) {
  const c10::NoGradGuard no_grad;
  if (!complete_) complete();
  const int64_t part = buffer_.numel() / layout_.ranks;
  double pre_divisor = 1;
  if (buffer_.scalar_type() == c10::kHalf && divide != 1.0) {
    pre_divisor = fp16_pre_divisor(divide);
    buffer_.as_strided({layout_.ranks, flags_offset_}, {part, 1}, 0).mul_(1.0 / pre_divisor);
  }
  post_scale_ = pre_divisor / divide;
  return std::exchange(buffer_, {});
}

void FlatGradients::unpack(const at::Tensor& sum, int64_t rank, c10::ScalarType dtype, const ValuesCallback& callback) {
  const at::Tensor values = allocate_values(sum, dtype);
  write_values(sum, values);
  deliver_values(sum, values, rank, callback);
}

at::Tensor FlatGradients::allocate_values(const at::Tensor& sum, c10::ScalarType dtype) {
  return dtype == sum.scalar_type() ? sum : pool_->empty(sum.numel(), dtype, sum.device());
}

void FlatGradients::write_values(const at::Tensor& sum, const at::Tensor& values) const {
  const c10::NoGradGuard no_grad;
  if (post_scale_ != 1.0) sum.narrow(0, 0, flags_offset_).mul_(post_scale_);
  if (!values.is_same(sum)) values.copy_(sum);
}

void FlatGradients::deliver_values(const at::Tensor& sum, const at::Tensor& values, int64_t rank,
                                   const ValuesCallback& callback) const {
  const c10::NoGradGuard no_grad;
  // `sum` also holds one flag per entry (parameter) of the layout, which is above 0 if any rank had a gradient for the
  // entry. To read the flags makes the host wait for the device, so they are read only if this rank has an entry
  // without a gradient. An entry with a gradient on this rank needs no flag: it counts as used on all ranks.
  at::Tensor flags;
  if (std::ranges::find(filled_, false) != filled_.end()) {
    flags = sum.narrow(0, flags_offset_, static_cast<int64_t>(filled_.size())).to(c10::kCPU, c10::kFloat);
  }
  for (size_t i = 0; i < filled_.size(); ++i) {
    if (filled_[i] || flags.const_data_ptr<float>()[i] > 0) callback(i, values_of(values, i, rank));
  }
}

at::Tensor FlatGradients::values_of(const at::Tensor& part, size_t index, int64_t rank) const {
  const auto& entry = layout_.entries[index];
  return part.narrow(0, entry.offset / entry.itemsize, entry.rows_on(rank) * entry.row_numel);
}

}  // namespace tessera
