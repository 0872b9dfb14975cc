// Gradients of several parameters in one flat buffer that ranks reduce together. Gradients accumulate in it over
// backwards. The buffer also holds one flag per parameter, so every rank knows after the reduction whether any rank had
// a gradient for the parameter.
//
//   FlatGradients flat(pool);
//   flat.open(layout, at::kFloat, device, memory);     // allocates the buffer
//   flat.add_all({gradient, other});                   // copies; adds from the second time on
//   at::Tensor sent = flat.close(divide);              // for a reduce-scatter, or with one part an all-reduce
//   ...
//   flat.unpack(sum, rank, at::kFloat, [&](size_t index, const at::Tensor& values) { ... });
//
// Belongs to one rank. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "tessera/parallel/data_parallel/buffer_pool.h"
#include "tessera/parallel/data_parallel/flat_layout.h"

namespace tessera {

class FlatGradients {
 public:
  explicit FlatGradients(std::shared_ptr<BufferPool> pool) : pool_(std::move(pool)) {}
  void set_pool(std::shared_ptr<BufferPool> pool) { pool_ = std::move(pool); }

  // Allocates the buffer in `dtype`. Each part has room for the entries of `layout` and one flag per entry. memory: the
  // allocator for buffers that are sent, which is Group::allocator() of the group that will reduce.
  void open(FlatLayout layout, c10::ScalarType dtype, c10::Device device, c10::Allocator* memory);
  bool is_open() const { return buffer_.defined(); }
  int64_t bytes() const { return is_open() ? static_cast<int64_t>(buffer_.nbytes()) : 0; }
  // Adds the gradient of an entry to the buffer. `gradient` is the gradient of the whole parameter, of any floating
  // dtype.
  void add(size_t index, const at::Tensor& gradient);
  // Adds the gradients of all entries to the buffer. `gradients` has one tensor per entry; an undefined tensor means
  // that the entry has no gradient. Each gradient is freed when it has been copied to the buffer.
  void add_all(std::vector<at::Tensor>&& gradients);
  // Discards the gradient of an entry.
  void forget(size_t index) {
    filled_[index] = false;
    complete_ = false;
  }
  bool has(size_t index) const { return filled_[index]; }
  // The accumulated gradient of an entry, 1-d. The layout must have one part (FlatLayout::ranks is 1), because with
  // several parts each part has only some rows of the gradient.
  at::Tensor accumulated(size_t index) const { return values_of(buffer_, index, 0); }
  // Returns whether `tensor` is a view of the buffer. Returns false while no buffer is allocated (is_open() is false).
  bool holds(const at::Tensor& tensor) const { return is_open() && tensor.is_alias_of(buffer_); }

  // Completes the buffer and returns it: [parts * part] elements, to be summed over ranks. After this call is_open() is
  // false. close() divides float16 gradients by fp16_pre_divisor(divide), so that their sum stays in range. unpack()
  // divides the sum by the rest of `divide`: divide / fp16_pre_divisor(divide) for float16, `divide` for other dtypes.
  at::Tensor close(double divide);
  // Unpacks part `rank` of `sum`, the sum of the ranks' buffers. Calls `callback` for each entry for which some rank
  // had a gradient. The callback gets the rows of the entry's gradient that are in this part, after the division that
  // close() describes, as a 1-d tensor of dtype `dtype`. All these tensors share one buffer.
  using ValuesCallback = std::function<void(size_t index, const at::Tensor& values)>;
  void unpack(const at::Tensor& sum, int64_t rank, c10::ScalarType dtype, const ValuesCallback& callback);
  // The three steps of unpack(). allocate_values() returns the tensor for the divided values: `sum` itself if its dtype
  // is `dtype`, else a new tensor. write_values() divides the sum and writes it to this tensor; this step may run on
  // another stream. deliver_values() calls `callback` with the entries' parts of this tensor, as unpack() describes.
  at::Tensor allocate_values(const at::Tensor& sum, c10::ScalarType dtype);
  void write_values(const at::Tensor& sum, const at::Tensor& values) const;
  void deliver_values(const at::Tensor& sum, const at::Tensor& values, int64_t rank,
                      const ValuesCallback& callback) const;
  void drop() { buffer_.reset(); }

 private:
  void complete();  // writes flags, and zeros where there is no gradient
  at::Tensor values_of(const at::Tensor& part, size_t index, int64_t rank) const;

  std::shared_ptr<BufferPool> pool_;
  FlatLayout layout_{1};
  int64_t flags_offset_ = 0;  // elements, inside a part
  std::vector<bool> filled_;  // entries with a gradient on this rank
  bool complete_ = false;     // padding and flags are written, too
  double post_scale_ = 1;     // factor that unpack() applies to the sum
  at::Tensor buffer_;
  FillConstants fill_;
};

}  // namespace tessera
