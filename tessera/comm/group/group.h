// A communication group: some ranks of a World, in a fixed order, with a back-end that carries their collectives.
//
//   auto group = world->new_group({0, 2}, "dp");     // COLLECTIVE over ranks 0 and 2
//   comm::all_reduce(*group, tensor).wait();
//
// A Group is used by one rank (process or thread). Two collectives on one group must be started in the
// same order by all its ranks; waiting may happen out of order. Not thread-safe.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera::comm {

class ComparesSignatures;
class Monitor;

// What a group has from its world.
struct GroupContext {
  std::shared_ptr<Monitor> monitor;       // null: nobody records and compares its collectives
  c10::intrusive_ptr<c10d::Store> store;  // of the group alone
  // Carries the tensors of an accelerator; null: the back-end of the group does.
  c10::intrusive_ptr<c10d::Backend> accelerator;
  uint32_t id = 0;                                          // tells groups of one name apart; the same on all its ranks
  c10::DeviceType accelerator_type = c10::DeviceType::CPU;  // of `accelerator`; CPU: there is none
};

class Group {
 public:
  // Use World::new_group. `ranks` are global, `rank` is this rank's position in them. A group of one
  // rank needs no back-end: its collectives are copies.
  Group(std::string name, std::vector<int> ranks, int rank, c10::intrusive_ptr<c10d::Backend> backend,
        GroupContext context = {});
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }  // inside the group
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }  // global rank of each member
  c10d::Backend& backend() const;                           // Error kInternal when the group has one rank
  c10d::Backend& backend(c10::DeviceType device) const;     // that carries tensors of this device
  // Of memory from which collectives send best: ranks of one host read each other's in place. Null where any memory of
  // the device is as good. Lives for ever.
  c10::Allocator* allocator(c10::DeviceType device) const;
  const GroupContext& context() const { return context_; }
  // Whether the back-ends take tensors of this device. Collectives of one rank are copies, wherever the tensors lie.
  bool carries(c10::DeviceType device) const {
    return size() == 1 || device == c10::DeviceType::CPU || context_.accelerator_type == device;
  }
  ComparesSignatures* comparing_backend() const { return comparing_; }  // null: it does not compare by itself
  uint64_t sequence() const { return sequence_; }                       // number of the last collective, from 1
  uint64_t next_sequence() { return ++sequence_; }
  // The same of messages, of each sender, receiver and tag.
  uint64_t next_message(int from, int to, int tag) { return ++messages_[{from, to, tag}]; }
  // Breaks off what is in flight: here and on the peers those collectives, and all later ones, end with Error
  // kComm. From any thread.
  void abort() noexcept;
  // Memory that collectives reuse from call to call; undefined while one of them has it. Calls that outlive the group
  // keep it.
  const std::shared_ptr<at::TensorBase>& scratch() { return scratch_; }

 private:
  std::string name_;
  std::vector<int> ranks_;
  int rank_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  GroupContext context_;
  ComparesSignatures* comparing_ = nullptr;  // the back-end
  uint64_t sequence_ = 0;
  std::map<std::tuple<int, int, int>, uint64_t> messages_;
  std::shared_ptr<at::TensorBase> scratch_ = std::make_shared<at::TensorBase>();
};

}  // namespace tessera::comm
