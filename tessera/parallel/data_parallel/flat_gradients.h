// Gradients of several parameters in one buffer that ranks sum: accumulated there over backwards, sent together with a
// flag for each parameter, by which every rank knows afterwards whether any rank had a gradient for it.
//
//   FlatGradients flat(pool);
//   flat.open(layout, at::kFloat, device, memory);     // room
//   flat.add_all({gradient, other});                   // copies, and adds from the second time on
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

  // Room for the entries of `layout` in each of its parts, and their flags, in `dtype`. memory: where the buffer is
  // sent from, Group::allocator() of the group that will reduce it.
  void open(FlatLayout layout, c10::ScalarType dtype, c10::Device device, c10::Allocator* memory);
  bool is_open() const { return buffer_.defined(); }
  int64_t bytes() const { return is_open() ? static_cast<int64_t>(buffer_.nbytes()) : 0; }
  // A gradient of the whole entry, of any floating dtype.
  void add(size_t index, const at::Tensor& gradient);
  // The same of all entries at once; undefined: none. Frees each when it is copied.
  void add_all(std::vector<at::Tensor>&& gradients);
  void forget(size_t index) {
    filled_[index] = false;
    complete_ = false;
  }
  bool has(size_t index) const { return filled_[index]; }
  // What has accumulated of an entry, flat; for layouts of one part.
  at::Tensor accumulated(size_t index) const { return values_of(buffer_, index, 0); }
  bool holds(const at::Tensor& tensor) const { return is_open() && tensor.is_alias_of(buffer_); }

  // The buffer, complete: [parts * part] elements whose sum over ranks, divided by `divide`, is wanted. It is no longer
  // open then. float16 is divided by a part of it already, so that the sum stays in range.
  at::Tensor close(double divide);
  // sum: of what close() gave, part `rank` of it. Hands over the values of each entry that some rank had, in its rows
  // of that part, flat, divided and as `dtype`; they share one buffer.
  using Take = std::function<void(size_t index, const at::Tensor& values)>;
  void unpack(const at::Tensor& sum, int64_t rank, c10::ScalarType dtype, const Take& take);
  // The same in three steps, the second of which may run elsewhere: where the values are to lie (`sum` itself, if its
  // dtype is wanted), dividing the sum and bringing it there, handing them over.
  at::Tensor room_for_values(const at::Tensor& sum, c10::ScalarType dtype);
  void bring_values(const at::Tensor& sum, const at::Tensor& values) const;
  void hand_over(const at::Tensor& sum, const at::Tensor& values, int64_t rank, const Take& take) const;
  void drop() { buffer_.reset(); }

 private:
  void complete();  // writes flags, and zeros where nothing is
  at::Tensor values_of(const at::Tensor& part, size_t index, int64_t rank) const;

  std::shared_ptr<BufferPool> pool_;
  FlatLayout layout_{1};
  int64_t flags_offset_ = 0;  // elements inside a part
  std::vector<bool> filled_;
  bool complete_ = false;  // padding and flags are written as well
  double post_scale_ = 1;
  at::Tensor buffer_;
  FlatFill fill_;
};

}  // namespace tessera
