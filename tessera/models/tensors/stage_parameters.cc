#include "tessera/models/tensors/stage_parameters.h"

#include <numeric>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/collectives/gather_names.h"

namespace tessera {

StageParameters::StageParameters(const MeshPtr& pipeline, const std::vector<SharedParameter>& own)
    : pipeline_(pipeline && pipeline->size() > 1 ? pipeline->group(0) : nullptr),
      mesh_(mesh_of(own)),
      is_mesh_leader_(!mesh_ || mesh_->rank() == mesh_->ranks().front()),
      device_(own.empty() ? c10::Device(at::kCPU) : own.front().tensor.device()) {
  if (!pipeline_) return;
  std::vector<std::string> names;
  for (const auto& parameter : own) names.insert(names.end(), parameter.names.begin(), parameter.names.end());
  const auto all = comm::gather_names(*pipeline_, names);
  // The owner of a parameter name is the first pipeline rank that has a parameter of this name.
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const auto& name : all[rank]) owners_.try_emplace(name, static_cast<int>(rank));
  }
}

int StageParameters::owner(const SharedParameter& parameter) const {
  for (const auto& name : parameter.names) {
    if (const auto found = owners_.find(name); found != owners_.end()) return found->second;
  }
  raise(ErrorKind::kInternal, "[models.save] {}: no stage of the pipeline has this parameter", parameter.names.front());
}

at::Tensor StageParameters::collect(const SharedParameter& parameter,
                                    const std::function<at::Tensor(const SharedParameter&)>& value_of) const {
  if (!pipeline_) return value_of(parameter);
  const int from = owner(parameter), rank = pipeline_->rank();
  const at::Tensor value = rank == from ? value_of(parameter) : at::Tensor();
  // `from` is the pipeline rank whose stage owns the parameter. The first rank of this stage's mesh sends the
  // parameter's value to pipeline rank 0. All pipeline ranks compute the same `from`, so the send on rank `from` and
  // the receive on rank 0 match.
  if (from == 0 || !is_mesh_leader_) return value;
  if (rank == from) comm::send(*pipeline_, value.to(parameter.tensor.scalar_type()).contiguous(), 0).wait();
  if (rank != 0) return value;
  auto theirs = at::empty(parameter.tensor.sizes(), parameter.tensor.options().device(device_));
  comm::recv(*pipeline_, theirs, from).wait();
  return theirs;
}

void StageParameters::attempt_on_all(const std::function<void()>& action) const {
  // The inner attempt_together() exchanges errors over the mesh and the outer one over the pipeline, so that an error
  // reaches all ranks of all stages.
  const auto on_mesh = [&] {
    if (!mesh_) return action();
    std::vector<int64_t> dims(static_cast<size_t>(mesh_->ndim()));
    std::iota(dims.begin(), dims.end(), 0);
    comm::attempt_together(mesh_->ndim() == 1 ? *mesh_->group(0) : *mesh_->group(dims), action);
  };
  if (!pipeline_) return on_mesh();
  comm::attempt_together(*pipeline_, on_mesh);
}

}  // namespace tessera
