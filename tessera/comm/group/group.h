// A communication group (PyTorch's process group): some ranks of a World, in a fixed order, with a back-end that runs
// their collectives.
//
//   auto group = world->new_group({0, 2}, "dp");     // COLLECTIVE over ranks 0 and 2
//   comm::all_reduce(*group, tensor).wait();
//
// A Group object belongs to one rank (a process or a thread). All ranks must start the collectives of a group in the
// same order; they may wait for them in any order. Not thread-safe.
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

// The parts of a group that its World provides.
struct GroupContext {
  std::shared_ptr<Monitor> monitor;       // null: the group's collectives are not recorded or compared
  c10::intrusive_ptr<c10d::Store> store;  // a store for this group alone
  // Back-end for an accelerator's tensors, e.g. NCCL. Null: the group's back-end takes all tensors.
  c10::intrusive_ptr<c10d::Backend> accelerator;
  uint32_t id = 0;                                          // distinguishes groups of one name; equal on all its ranks
  c10::DeviceType accelerator_type = c10::DeviceType::CPU;  // device of `accelerator`; CPU: there is none
};

class Group {
 public:
  // Use World::new_group instead. `ranks` are global ranks, `rank` is the position of this rank in `ranks`. A group of
  // one rank needs no back-end: its collectives are copies.
  Group(std::string name, std::vector<int> ranks, int rank, c10::intrusive_ptr<c10d::Backend> backend,
        GroupContext context = {});
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }  // position of this rank in the group
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }  // global rank of each member
  c10d::Backend& backend() const;                           // Error kInternal when the group has one rank
  c10d::Backend& backend(c10::DeviceType device) const;     // the back-end for tensors of this device
  // Allocator of memory that other ranks of the host can read in place, so that collectives send from it without a
  // copy. Null for an accelerator, and when the back-end has no such allocator. The allocator is never destroyed.
  c10::Allocator* allocator(c10::DeviceType device) const;
  const GroupContext& context() const { return context_; }
  // Whether collectives of this group accept tensors of this device. A group of one rank accepts all devices, because
  // its collectives are copies.
  bool supports_device(c10::DeviceType device) const {
    return size() == 1 || device == c10::DeviceType::CPU || context_.accelerator_type == device;
  }
  ComparesSignatures* comparing_backend() const {
    return comparing_;
  }                                                // null: the back-end does not compare signatures
  uint64_t sequence() const { return sequence_; }  // number of the last collective, from 1
  uint64_t next_sequence() { return ++sequence_; }
  // Number of the next message, counted from 1 for each combination of sender, receiver and tag.
  uint64_t next_message(int from, int to, int tag) { return ++messages_[{from, to, tag}]; }
  // Aborts the collectives that are under way. These and all later ones end with Error kComm, on this rank and on its
  // peers. May be called from any thread.
  void abort() noexcept;
  // Scratch tensor that collectives reuse from call to call; an undefined tensor while a call uses the memory. It is
  // held by a shared_ptr, since a call may outlive the group.
  const std::shared_ptr<at::TensorBase>& scratch() { return scratch_; }

 private:
  std::string name_;
  std::vector<int> ranks_;
  int rank_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  GroupContext context_;
  ComparesSignatures* comparing_ = nullptr;  // `backend_` under another interface; null: it does not compare
  uint64_t sequence_ = 0;
  std::map<std::tuple<int, int, int>, uint64_t> messages_;
  std::shared_ptr<at::TensorBase> scratch_ = std::make_shared<at::TensorBase>();
};

}  // namespace tessera::comm
