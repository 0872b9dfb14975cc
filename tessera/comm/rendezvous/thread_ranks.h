// Ranks that live in one process as threads.
//
//   comm::run_thread_ranks(4, [](const std::shared_ptr<comm::World>& world) { train(world); });
#pragma once

#include <functional>
#include <memory>

#include "tessera/comm/rendezvous/world.h"

namespace tessera::comm {

// Runs `body` as `size` ranks in threads of this process over one in-memory store, and returns when all have
// ended. The first exception of a rank that is not another one's consequence (PeerFailed) is thrown
// again; the others' waits are broken off. Each rank computes
// with its share of the cores. Error kConfig for fewer than one rank.
void run_thread_ranks(int size, const std::function<void(std::shared_ptr<World>)>& body, WorldOptions options = {});

}  // namespace tessera::comm
