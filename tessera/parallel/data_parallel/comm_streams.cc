#include "tessera/parallel/data_parallel/comm_streams.h"

#include <utility>

#include "tessera/comm/rendezvous/new_group_like.h"

namespace tessera {

CommStreams::CommStreams(c10::Device device)
    : gather(device),
      reduce(device),
      replicas(device, /*high_priority=*/false),
      to_host(device, /*high_priority=*/false),
      device_(device) {}

std::shared_ptr<comm::Group> CommStreams::second_group(const std::shared_ptr<comm::Group>& group) {
  if (!reduce.exists() || group->context().accelerator == nullptr) return group;
  auto& second = second_groups_[group.get()];
  if (!second) second = comm::new_group_like(group, group->name() + "_reductions");
  return second;
}

void CommStreams::retire(std::vector<at::Tensor>&& buffers) {
  free_retired();
  if (!gather.exists()) return buffers.clear();
  retired_ = std::move(buffers);
  last_use_ = DeviceEvent::record_on_current(device_);
}

void CommStreams::retire(c10::DataPtr&& memory) {
  free_retired();
  if (!gather.exists()) return memory.clear();
  retired_memory_ = std::move(memory);
  last_use_ = DeviceEvent::record_on_current(device_);
}

void CommStreams::free_retired() {
  if (retired_.empty() && !retired_memory_) return;
  // The retired buffers were allocated on the gather stream, so once they are freed, the caching allocator may reuse
  // them for the next launch on that stream. The gather stream therefore first waits for the last use of the buffers on
  // the compute stream.
  gather.wait_event(last_use_);
  retired_.clear();
  retired_memory_.clear();
}

}  // namespace tessera
