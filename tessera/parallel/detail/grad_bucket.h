// Gradients of some replicated parameters on their way through one all-reduce.
//
//   bucket.add(position, gradient);    // local; adds where there is one from a backward without synchronisation
//   bucket.start(group, divide);       // COLLECTIVE over the group; returns at once
//   ...
//   bucket.finish();                   // waits; the parameters' grad() are views of the bucket
//
// A parameter that no rank had a gradient for keeps its grad() as it was. Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/nn/module.h"
#include "tessera/parallel/detail/flat_gradients.h"
#include "tessera/parallel/detail/sharded_param.h"

namespace tessera::parallel {

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
             c10::Allocator* memory, std::string name);
  ~GradBucket();
  GradBucket(GradBucket&&) noexcept;

  // COLLECTIVE over the parameter's own mesh when its gradient is a DTensor that lies otherwise.
  void add(size_t position, const at::Tensor& gradient);
  // Lets grad() show what has accumulated, where it shows nothing else.
  void show_accumulated();
  void start(comm::Group& group, double divide);
  void finish();
  void drop();  // after an error: waits for what is in flight and forgets it
  bool started() const { return sent_.defined(); }
  bool accumulated() const { return flat_.is_open(); }
  size_t size() const { return params_.size(); }

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
  at::Tensor sent_;
  comm::Pending pending_;
};

}  // namespace tessera::parallel
