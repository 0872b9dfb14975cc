#include "tessera/models/tensors/stage_values.h"

#include <numeric>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/collectives/gather_names.h"

namespace tessera {

void attempt_on_all(const MeshPtr& mesh, comm::Group* pipeline, const std::function<void()>& action) {
  const auto on_mesh = [&] {
    if (!mesh) return action();
    std::vector<int64_t> dims(static_cast<size_t>(mesh->ndim()));
    std::iota(dims.begin(), dims.end(), 0);
    comm::attempt_together(mesh->ndim() == 1 ? *mesh->group(0) : *mesh->group(dims), action);
  };
  if (pipeline == nullptr) return on_mesh();
  comm::attempt_together(*pipeline, on_mesh);
}

StageValues::StageValues(comm::Group& pipeline, const std::vector<SharedParameter>& own)
    : pipeline_(pipeline), device_(own.empty() ? c10::Device(at::kCPU) : own.front().tensor.device()) {
  std::vector<std::string> names;
  for (const auto& parameter : own) names.insert(names.end(), parameter.names.begin(), parameter.names.end());
  const auto all = comm::gather_names(pipeline, names);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const auto& name : all[rank]) owners_.try_emplace(name, static_cast<int>(rank));
  }
}

int StageValues::owner(const SharedParameter& parameter) const {
  for (const auto& name : parameter.names) {
    if (const auto found = owners_.find(name); found != owners_.end()) return found->second;
  }
  raise(ErrorKind::kInternal, "[models.save] {}: no stage of the pipeline holds it", parameter.names.front());
}

at::Tensor StageValues::bring(const SharedParameter& parameter, const at::Tensor& value) const {
  const int from = owner(parameter);
  if (from == 0) return value;
  if (rank() == from) comm::send(pipeline_, value.to(parameter.tensor.scalar_type()).contiguous(), 0).wait();
  if (rank() != 0) return value;
  auto theirs = at::empty(parameter.tensor.sizes(), parameter.tensor.options().device(device_));
  comm::recv(pipeline_, theirs, from).wait();
  return theirs;
}

}  // namespace tessera
