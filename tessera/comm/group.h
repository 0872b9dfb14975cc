// A communication group: some ranks of a World, in a fixed order, with a back-end that carries their collectives.
//
//   auto group = world->new_group({0, 2}, "dp");     // COLLECTIVE over ranks 0 and 2
//   comm::all_reduce(*group, tensor).wait();
//
// A Group is used by one rank (process or thread). Two collectives on one group must be started in the
// same order by all its ranks; waiting may happen out of order. Not thread-safe.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Backend;
}

namespace tessera::comm {

class Group {
 public:
  // Use World::new_group. `ranks` are global, `rank` is this rank's position in them. A group of one
  // rank needs no back-end: its collectives are copies.
  Group(std::string name, std::vector<int> ranks, int rank, c10::intrusive_ptr<c10d::Backend> backend);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }                        // inside the group
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }  // global rank of each member
  c10d::Backend& backend() const;                           // Error kInternal when the group has one rank
  uint64_t next_sequence() { return ++sequence_; }          // number of the next collective, from 1
  // Breaks off what is in flight: here and on the peers those collectives, and all later ones, end with Error
  // kComm. From any thread.
  void abort() noexcept;
  // Memory that collectives reuse from call to call; undefined while one of them has it.
  at::TensorBase& scratch() { return scratch_; }

 private:
  std::string name_;
  std::vector<int> ranks_;
  int rank_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  uint64_t sequence_ = 0;
  at::TensorBase scratch_;
};

}  // namespace tessera::comm
