// Sends the parameters of a pipeline-parallel model to the first rank, one parameter at a time.
//
//   const StageParameters stages(pipeline, shared_parameters(*own));       // COLLECTIVE over the pipeline
//   for (const auto& parameter : shared_parameters(*whole)) {
//     const at::Tensor value = stages.collect(parameter, value_of);   // on the first rank: the parameter's value
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
  // Exchanges the names of the parameters of all pipeline ranks, so that collect() knows which rank has a parameter.
  // `own` are the parameters of this rank's stages. `pipeline` is the 1-d pipeline-parallel mesh; it is null or has one
  // rank when this rank has the whole model. COLLECTIVE over the pipeline.
  StageParameters(const MeshPtr& pipeline, const std::vector<SharedParameter>& own);

  // The ranks of the pipeline; null when this rank has the whole model.
  comm::Group* pipeline() const { return pipeline_.get(); }
  // Whether this rank writes the whole model: it is pipeline rank 0 and the first rank of the parameters' mesh.
  bool is_writer() const { return is_mesh_leader_ && (!pipeline_ || pipeline_->rank() == 0); }
  // Returns the value of a parameter on the writing rank, the rank for which is_writer() is true. With a pipeline only
  // the first rank in pipeline() that has the parameter calls `value_of`, and if this is not pipeline rank 0, the value
  // is sent to the writing rank, in the parameter's dtype. Of the ranks of the parameters' mesh only the first one
  // sends. All other ranks return an undefined tensor, or the value of their `value_of` call. Error kInternal for a
  // parameter that no rank has. COLLECTIVE over the pipeline; also COLLECTIVE over the parameters' mesh if `value_of`
  // is COLLECTIVE over this mesh.
  at::Tensor collect(const SharedParameter& parameter,
                     const std::function<at::Tensor(const SharedParameter&)>& value_of) const;
  // Runs `action` on the ranks of the mesh and of the pipeline. When it throws on one rank, every rank throws
  // (comm/collectives/agreement.h). COLLECTIVE over the mesh and the pipeline.
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
