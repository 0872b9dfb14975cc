// Observes the collectives that the calling thread starts, including those of threads that run a backward pass for it.
// Collectives of groups of one rank are not observed.
//
//   struct Counter : comm::CollectiveObserver {
//     void on_collective(comm::Op op, int64_t bytes, const comm::Group& group) override { ++count; }
//     int count = 0;
//   } counter;                                   // observes until it is destroyed
//
// An observer must be destroyed on the thread that made it. All living observers are called, also nested ones. The
// calls come from several threads at once when a backward pass runs on several devices. No communication.
#pragma once

#include <cstdint>

#include "tessera/comm/group/context_value.h"
#include "tessera/comm/group/op.h"

namespace tessera::comm {

class Group;

class CollectiveObserver {
 public:
  CollectiveObserver();
  virtual ~CollectiveObserver() = default;
  CollectiveObserver(const CollectiveObserver&) = delete;
  CollectiveObserver& operator=(const CollectiveObserver&) = delete;

  // `bytes`: the traffic from other ranks to this one under the best algorithm, for k ranks. all_gather: (k-1) inputs;
  // reduce_scatter: (k-1) outputs; all_reduce: 2 (k-1)/k of the tensor; all_to_all: the output without this rank's own
  // part; broadcast, scatter and recv: the received tensor, for broadcast and scatter also on the root; send: 0.
  virtual void on_collective(Op op, int64_t bytes, const Group& group) = 0;

  static void notify(Op op, int64_t bytes, const Group& group);

 private:
  ContextValue in_force_;
};

}  // namespace tessera::comm
