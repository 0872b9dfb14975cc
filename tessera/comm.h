// Communication between the ranks of a run: rendezvous, process groups, collectives and their errors. The comment of a
// function that communicates says COLLECTIVE over a group or world: all ranks of this group or world must call the
// function, in the same order.
//
//   const auto world = comm::World::connect({});  // in a process of tessera launch, torchrun, Slurm or MPI
//   comm::all_reduce(*world->group(), sums, comm::ReduceOp::kSum).wait();
#pragma once

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/version.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/errors/timed_out.h"
#include "tessera/comm/group/group.h"
#include "tessera/comm/launch/launcher.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/comm/rendezvous/world.h"
