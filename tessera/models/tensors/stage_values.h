// The parameters of a model whose layers lie over the ranks of a pipeline, one after another on its first rank.
//
//   const StageValues stages(pipeline, shared_parameters(*own));       // COLLECTIVE over the pipeline
//   for (const auto& parameter : shared_parameters(*whole)) {
//     const at::Tensor value = stages.collect(parameter, value_of);    // on the rank that writes: the owner's
//   }
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/models/tensors/local_part.h"

namespace tessera {

class StageValues {
 public:
  // `own`: what this rank's stages hold. `pipeline`: 1-d; null, or of one rank, where the model is whole. COLLECTIVE
  // over it.
  StageValues(const MeshPtr& pipeline, const std::vector<SharedParameter>& own);

  // The ranks of the pipeline; null where the model is whole.
  comm::Group* pipeline() const { return pipeline_.get(); }
  // Whether this rank is the one that writes the whole model: the first of its mesh, in the first stage.
  bool writes() const { return speaks_ && (!pipeline_ || pipeline_->rank() == 0); }
  // The value of a parameter, which `value_of` gives on the first ranks of the pipeline that hold it: on the rank that
  // writes, in the dtype of the parameter where another rank sent it. Other ranks return what they gave. Error
  // kInternal for a parameter that none holds. COLLECTIVE over the pipeline, as `value_of` is over the mesh.
  at::Tensor collect(const SharedParameter& parameter,
                     const std::function<at::Tensor(const SharedParameter&)>& value_of) const;
  // Runs `action` on the ranks of the mesh and of the pipeline. When it throws on any, every rank throws
  // (comm/collectives/agreement.h). COLLECTIVE over both.
  void attempt_on_all(const std::function<void()>& action) const;

 private:
  int owner(const SharedParameter& parameter) const;
  std::shared_ptr<comm::Group> pipeline_;
  MeshPtr mesh_;  // of the parameters; null: they are plain
  bool speaks_;   // the first rank of the mesh
  c10::Device device_;
  std::map<std::string, int> owners_;  // of each name
};

}  // namespace tessera
