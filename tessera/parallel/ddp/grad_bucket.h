// A bucket: the gradients of some replicated parameters in one flat buffer, summed by one all-reduce.
//
//   at::Tensor local = bucket.prepare(position, gradient);
//   bucket.add(position, local);       // copies; adds to a gradient left by a backward without synchronisation
//   bucket.start(group, divide);       // COLLECTIVE over the group; returns at once
//   ...
//   bucket.finish();                   // waits; the parameters' grad() are views of the bucket
//
// On an accelerator add() runs on the stream `reduce` of CommStreams, where it packs the gradients. The all-reduce and
// the division run on the stream `replicas`. No computation waits for either stream before finish(). The memory is
// allocated from the compute stream, because grad() is used and freed there. If no rank has a gradient for a parameter,
// its grad() does not change. Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/parallel/data_parallel/comm_streams.h"
#include "tessera/parallel/data_parallel/flat_gradients.h"
#include "tessera/parallel/data_parallel/reduction_stages.h"
#include "tessera/parallel/fsdp/sharded_param.h"

namespace tessera {

struct ReplicatedParam {
  std::string name;
  std::vector<SlotRef> slots;     // all slots that share the parameter; more than one: tied
  at::Tensor parameter;           // a plain tensor, or a DTensor of another mesh
  c10::ScalarType compute_dtype;  // dtype of the tensor that forward reads and of its gradient
};

class GradBucket {
 public:
  // `params` must stay valid while the bucket lives. `memory` is Group::allocator() of the group that will reduce.
  GradBucket(std::vector<ReplicatedParam*> params, c10::ScalarType dtype, std::shared_ptr<BufferPool> pool,
             std::shared_ptr<CommStreams> streams, c10::Allocator* memory, std::string name);
  ~GradBucket();
  GradBucket(GradBucket&&) noexcept;

  // Opens the buffer if needed and returns the gradient's local tensor, which add() takes. COLLECTIVE over the
  // parameter's own mesh when the gradient is a DTensor with other placements than the parameter. Error kShape for a
  // sparse gradient.
  at::Tensor prepare(size_t position, const at::Tensor& gradient);
  void add(size_t position, const at::Tensor& local);
  // Sets grad() of each parameter to a view of its accumulated gradient, where grad() is undefined.
  void expose_accumulated();
  // Starts the all-reduce; the sum is divided by `divide`. COLLECTIVE over the group.
  void start(const std::shared_ptr<comm::Group>& group, double divide);
  // After the all-reduce: divides the sum and casts it to the parameters' dtype. On an accelerator the kernels are only
  // launched, on the stream `replicas`; on a CPU the host waits for the all-reduce. Does nothing if it was called
  // before or the bucket was not started.
  void write_values();
  void finish();
  void drop();  // after an error: waits for the reduction in flight and discards it
  bool started() const { return started_; }
  // Whether the bucket holds gradients that are not reduced yet.
  bool accumulated() const { return flat_.is_open(); }

 private:
  void open_buffer();
  void discard_zeroed_gradients();
  at::Tensor view_as_parameter(const at::Tensor& values, size_t position) const;
  void set_gradient(size_t position, const at::Tensor& values);

  std::vector<ReplicatedParam*> params_;
  c10::ScalarType dtype_;  // of the buffer and the all-reduce
  c10::Allocator* memory_;
  std::string name_;
  FlatLayout layout_{1};
  FlatGradients flat_;
  std::vector<bool> exposed_;  // grad() is a view of the gradient that accumulates here
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<CommStreams> streams_;
  ReductionStages stages_;
  bool started_ = false;
  at::Tensor sum_, values_;     // the sum, and the divided values in the parameters' dtype; set by write_values()
  DeviceEvent values_written_;  // after the division on the stream `replicas`
};

}  // namespace tessera
