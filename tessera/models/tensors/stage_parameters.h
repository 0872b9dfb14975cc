// Collects the parameters of a model whose layers are distributed over pipeline ranks, one at a time, on the first
// rank.
//
//   const StageParameters stages(pipeline, shared_parameters(*own));       // COLLECTIVE over the pipeline
//   for (const auto& parameter : shared_parameters(*whole)) {
//     const at::Tensor value = stages.collect(parameter, value_of);   // on the writing rank: the value of the owner
//   }
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/models/tensors/model_parameters.h"

namespace tessera {

class StageParameters {
 public:
  // `own` are the parameters of this rank's stages. `pipeline` is 1-d; null or of one rank when this rank has the whole
  // model. COLLECTIVE over the pipeline.
  StageParameters(const MeshPtr& pipeline, const std::vector<SharedParameter>& own);

  // The ranks of the pipeline; null when this rank has the whole model.
  comm::Group* pipeline() const { return pipeline_.get(); }
  // Whether this rank writes the whole model: the first rank of its mesh, in the first stage.
  bool is_writer() const { return is_mesh_leader_ && (!pipeline_ || pipeline_->rank() == 0); }
  // Returns the value of a parameter on the writing rank. The first pipeline rank that has the parameter gets the value
  // from `value_of`. When that is another rank, the value is sent in the parameter's dtype. Other ranks return their
  // own value, or an undefined tensor. Error kInternal for a parameter that no rank has. COLLECTIVE over the pipeline,
  // and over the mesh when `value_of` is.
  at::Tensor collect(const SharedParameter& parameter,
                     const std::function<at::Tensor(const SharedParameter&)>& value_of) const;
  // Runs `action` on the ranks of the mesh and of the pipeline. When it throws on a rank, every rank throws
  // (comm/collectives/agreement.h). COLLECTIVE over both.
  void attempt_on_all(const std::function<void()>& action) const;

 private:
  int owner(const SharedParameter& parameter) const;
  std::shared_ptr<comm::Group> pipeline_;
  MeshPtr mesh_;         // mesh of the parameters; null: plain tensors
  bool is_mesh_leader_;  // whether this is the first rank of the mesh
  c10::Device device_;
  std::map<std::string, int> owners_;  // the pipeline rank of each name
};

}  // namespace tessera
