// The parameters of a model whose layers lie over the ranks of a pipeline, one after another on its first rank.
//
//   const StageValues stages(*pipeline, shared_parameters(*own));      // COLLECTIVE over the pipeline
//   for (const auto& parameter : shared_parameters(*whole)) {
//     if (stages.gives(parameter)) value = ...;
//     value = stages.bring(parameter, value);                          // on rank 0: the owner's
//   }
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/models/tensors/local_part.h"

namespace tessera {

class StageValues {
 public:
  // `own`: what this rank's stages hold. COLLECTIVE over the pipeline.
  StageValues(comm::Group& pipeline, const std::vector<SharedParameter>& own);

  int rank() const { return pipeline_.rank(); }
  // Whether this rank is the first of those that hold it. Error kInternal for one that none holds.
  bool gives(const SharedParameter& parameter) const { return owner(parameter) == rank(); }
  // Sends the value of the rank that gives it to rank 0, which returns it, in the dtype of the parameter; the others
  // return what they passed.
  // COLLECTIVE over these two ranks.
  at::Tensor bring(const SharedParameter& parameter, const at::Tensor& value) const;

 private:
  int owner(const SharedParameter& parameter) const;
  comm::Group& pipeline_;
  c10::Device device_;
  std::map<std::string, int> owners_;  // of each name
};

// Runs `action` on the ranks of the mesh (null: on this one) and of the pipeline (null: none). When it throws on any,
// every rank throws (comm/collectives/agreement.h). COLLECTIVE over both.
void attempt_on_all(const MeshPtr& mesh, comm::Group* pipeline, const std::function<void()>& action);

}  // namespace tessera
