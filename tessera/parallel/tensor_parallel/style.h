// A style makes one module tensor parallel: it shards the module's parameters over a 1-d mesh, and registers hooks that
// set the placements of inputs and outputs. Semantics of torch.distributed.tensor.parallel.
//
//   ParallelPlan plan;
//   plan.set("mlp.up_proj", std::make_shared<ColwiseParallel>());
//   plan.set("mlp.down_proj", std::make_shared<RowwiseParallel>());
//   parallelize_module(*layer, tp_mesh, plan);                                     // parallelize_module.h
//
// Styles are immutable and may be shared between modules and ranks; applying a style changes the module only.
// Thread-safe.
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

// Finds, for a parameter slot, all slots below `root` that hold the same tensor. With it a style that shards one of
// several tied parameters shards all of them.
class TiedParameters {
 public:
  explicit TiedParameters(nn::Module& root);
  // All slots tied to `slot`, including `slot` itself. The result is correct only while the slots hold the tensors that
  // they held when this object was made.
  std::vector<nn::ParameterSlot*> of(nn::ParameterSlot& slot) const;

 private:
  std::vector<at::Tensor> kept_;  // keeps the tensors alive, so no address in by_tensor_ is reused
  std::unordered_map<const c10::TensorImpl*, std::vector<nn::ParameterSlot*>> by_tensor_;
};

// The context in which a style is applied.
struct StyleContext {
  MeshPtr mesh;                      // 1-d
  std::string path;                  // of the module in the model, for messages
  std::optional<int> src_data_rank;  // rank whose values are used; none: every rank shards its own values
  const TiedParameters* tied = nullptr;
  std::set<nn::Module*>* styled = nullptr;  // modules that have a style; a style that creates modules adds them

  // Makes the parameter in `slot`, and all parameters tied to it, DTensors with `placement`. On the meta device nothing
  // is communicated. Error kConfig where a tied parameter is a DTensor with another placement already. COLLECTIVE over
  // the mesh with src_data_rank.
  void distribute(nn::ParameterSlot& slot, const Placement& placement) const;
  // Makes all plain parameters and buffers of the module replicated DTensors with this rank's values. No communication.
  void replicate_plain(nn::Module& module) const;

 private:
  // Replaces a parameter, and all parameters tied to it, by `made`.
  void replace_tied(nn::ParameterSlot& slot, at::Tensor made) const;
};

class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  // Applies the style to a module. A style that shards parameters may be applied to a module once. COLLECTIVE over the
  // mesh with src_data_rank, unless the parameters are on the meta device. Error kConfig for a module that the style
  // does not support.
  virtual void apply(nn::Module& module, const StyleContext& context) const = 0;
  // Describes the style as text, for example "ColwiseParallel(R -> S(-1), local)".
  virtual std::string describe() const = 0;
};
using StylePtr = std::shared_ptr<const ParallelStyle>;

// A map from module patterns to styles, in the order in which the patterns were first set. A pattern is split at dots,
// and each part is matched like a file name ("layers.*.mlp", "l?"). The pattern "" is the module itself.
class ParallelPlan {
 public:
  ParallelPlan() = default;
  ParallelPlan(std::initializer_list<std::pair<std::string, StylePtr>> entries);
  void set(const std::string& pattern, StylePtr style);  // a pattern that exists keeps its position
  void update(const ParallelPlan& other);
  void erase(const std::string& pattern);
  const ParallelStyle* find(const std::string& pattern) const;
  const std::vector<std::pair<std::string, StylePtr>>& entries() const { return entries_; }
  bool empty() const { return entries_.empty(); }

 private:
  std::vector<std::pair<std::string, StylePtr>> entries_;
};

}  // namespace tessera
