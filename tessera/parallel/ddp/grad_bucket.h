// Gradients of some replicated parameters on their way through one all-reduce.
//
//   at::Tensor local = bucket.prepare(position, gradient);
//   bucket.add(position, local);       // copies; adds where there is one from a backward without synchronisation
//   bucket.start(group, divide);       // COLLECTIVE over the group; returns at once
//   ...
//   bucket.finish();                   // waits; the parameters' grad() are views of the bucket
//
// On an accelerator gradients are packed on the stream `reduce` of CommStreams, where add() is called, and summed and
// divided on `replicas`; nothing that computes comes behind either before finish(). The memory is the computing
// stream's, where grad() is used and freed. A parameter that no rank had a gradient for keeps its grad() as it was.
// Belongs to one rank.
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
  std::vector<SlotRef> slots;     // more than one: tied
  at::Tensor parameter;           // plain, or a DTensor of another mesh
  c10::ScalarType compute_dtype;  // of what forward reads, and so of its gradient
};

class GradBucket {
 public:
  // `params` stay in place while the bucket lives. `memory` is Group::allocator() of the group that will reduce.
  GradBucket(std::vector<ReplicatedParam*> params, c10::ScalarType dtype, std::shared_ptr<BufferPool> pool,
             std::shared_ptr<CommStreams> streams, c10::Allocator* memory, std::string name);
  ~GradBucket();
  GradBucket(GradBucket&&) noexcept;

  // Makes room for the gradient; returns what is to be added: its local part, as the parameter lies. COLLECTIVE over
  // the parameter's own mesh when the gradient is a DTensor that lies otherwise.
  at::Tensor prepare(size_t position, const at::Tensor& gradient);
  void add(size_t position, const at::Tensor& local);
  // Lets grad() show what has accumulated, where it shows nothing else.
  void show_accumulated();
  void start(const std::shared_ptr<comm::Group>& group, double divide);
  // Behind the sum, the gradients are brought where they are to lie: on an accelerator beside what computes, on a CPU
  // when the sum is there. Nothing where that has been done, or the bucket is not under way.
  void bring_values();
  void finish();
  void drop();  // after an error: waits for what is in flight and forgets it
  bool started() const { return started_; }
  bool accumulated() const { return flat_.is_open(); }

 private:
  void begin();
  void forget_dropped();
  at::Tensor shaped(const at::Tensor& values, size_t position) const;
  void set_gradient(size_t position, const at::Tensor& values);

  std::vector<ReplicatedParam*> params_;
  c10::ScalarType dtype_;  // travels
  c10::Allocator* memory_;
  std::string name_;
  FlatLayout layout_{1};
  FlatGradients flat_;
  std::vector<bool> shown_;  // grad() shows what has accumulated here
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<CommStreams> streams_;
  ReductionStages stages_;
  bool started_ = false;
  at::Tensor sum_, values_;  // once they are brought
  StreamMark brought_;
};

}  // namespace tessera
