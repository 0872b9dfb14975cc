// How one module becomes tensor parallel: its parameters are sharded over a 1-d mesh, and hooks around its call say how
// inputs and outputs lie. Semantics of torch.distributed.tensor.parallel.
//
//   ParallelPlan plan;
//   plan.set("mlp.up_proj", std::make_shared<ColwiseParallel>());
//   plan.set("mlp.down_proj", std::make_shared<RowwiseParallel>());
//   parallelize_module(*layer, tp_mesh, plan);                                     // parallelize_module.h
//
// Styles are constants, shared between modules and ranks; applying one changes the module alone. Thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera {

// The slots that show one tensor, for all tensors of a module: a style that shards one of several tied parameters
// shards them all.
class TiedSlots {
 public:
  explicit TiedSlots(nn::Module& root);
  // Those tied to `slot`, itself among them, while they show the tensors that they showed when this was made.
  std::vector<nn::ParameterSlot*> of(nn::ParameterSlot& slot) const;

 private:
  std::vector<at::Tensor> kept_;  // so that no address is used again
  std::unordered_map<const c10::TensorImpl*, std::vector<nn::ParameterSlot*>> by_tensor_;
};

// Where a style is applied.
struct StyleContext {
  MeshPtr mesh;                      // 1-d
  std::string path;                  // of the module, for messages
  std::optional<int> src_data_rank;  // whose values count; none: every rank cuts its own
  const TiedSlots* tied = nullptr;
  std::set<nn::Module*>* styled = nullptr;  // modules that have a style; one that makes modules adds them

  // Shards a parameter, and all that are tied to it. On the meta device nothing is communicated. Error kConfig where a
  // tied parameter lies in another way already. COLLECTIVE over the mesh with src_data_rank.
  void distribute(nn::ParameterSlot& slot, const Placement& placement) const;
  // All parameters and buffers of the module that are still plain become replicated DTensors, of this rank's values.
  void replicate_rest(nn::Module& module) const;

 private:
  // Puts `made` in place of a parameter and of all that are tied to it.
  void show(nn::ParameterSlot& slot, at::Tensor made) const;
};

class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  // Once a module and style that shards parameters. COLLECTIVE over the mesh with src_data_rank, unless parameters are
  // on the meta device. Error kConfig for a module that the style cannot take.
  virtual void apply(nn::Module& module, const StyleContext& context) const = 0;
  // "ColwiseParallel(R -> S(-1), local)"
  virtual std::string describe() const = 0;
};
using StylePtr = std::shared_ptr<const ParallelStyle>;

// Styles by the pattern of the modules that they are for, in the order in which they were first set. A pattern is split
// at dots, each part matched as a file name is ("layers.*.mlp", "l?"); "" is the module itself.
class ParallelPlan {
 public:
  ParallelPlan() = default;
  ParallelPlan(std::initializer_list<std::pair<std::string, StylePtr>> entries);
  void set(const std::string& pattern, StylePtr style);  // replaces one of the same pattern at its place
  void update(const ParallelPlan& other);
  void erase(const std::string& pattern);
  const ParallelStyle* find(const std::string& pattern) const;
  const std::vector<std::pair<std::string, StylePtr>>& entries() const { return entries_; }
  bool empty() const { return entries_.empty(); }

 private:
  std::vector<std::pair<std::string, StylePtr>> entries_;
};

}  // namespace tessera
