// Sees every collective on groups of more than one rank that this thread starts, or a thread that runs a backward for
// it.
//
//   struct Counter : comm::CollectiveObserver {
//     void on_collective(comm::Op op, int64_t bytes, const comm::Group& group) override { ++count; }
//     int count = 0;
//   } counter;                                   // watches until it is destroyed
//
// Observers end on the thread that made them; all of them are told, from several threads where a backward is at work on
// several devices. No communication.
#pragma once

#include <cstdint>

#include "tessera/comm/group/op.h"
#include "tessera/comm/group/propagated.h"

namespace tessera::comm {

class Group;

class CollectiveObserver {
 public:
  CollectiveObserver();
  virtual ~CollectiveObserver() = default;
  CollectiveObserver(const CollectiveObserver&) = delete;
  CollectiveObserver& operator=(const CollectiveObserver&) = delete;

  // bytes: what the best algorithm brings to this rank from the others. all_gather (k-1) inputs, reduce_scatter (k-1)
  // outputs, all_reduce 2 (k-1)/k of the tensor, all_to_all the output without the own part, broadcast and scatter what
  // is received, also on the root; send 0.
  virtual void on_collective(Op op, int64_t bytes, const Group& group) = 0;

  static void notify(Op op, int64_t bytes, const Group& group);

 private:
  Propagated in_force_;
};

}  // namespace tessera::comm
