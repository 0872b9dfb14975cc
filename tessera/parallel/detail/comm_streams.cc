#include "tessera/parallel/detail/comm_streams.h"

#include <utility>

namespace tessera::parallel {

CommStreams::CommStreams(c10::Device device)
    : gather(device),
      reduce(device),
      replicas(device, /*high_priority=*/false),
      to_host(device, /*high_priority=*/false),
      device_(device) {}

std::shared_ptr<comm::Group> CommStreams::second_group(comm::World& world, const std::shared_ptr<comm::Group>& group) {
  if (!reduce.exists() || group->context().accelerator == nullptr) return group;
  auto& second = second_groups_[group.get()];
  if (!second) second = world.new_group(group->ranks(), group->name() + "_reductions", device_.type());
  return second;
}

void CommStreams::retire(std::vector<at::Tensor>&& buffers) {
  free_retired();
  if (!gather.exists()) return buffers.clear();
  retired_ = std::move(buffers);
  last_use_ = StreamMark::here(device_);
}

void CommStreams::free_retired() {
  if (retired_.empty()) return;
  gather.follow(last_use_);
  retired_.clear();
}

}  // namespace tessera::parallel
