// Runs ranks as threads of one process.
//
//   comm::run_thread_ranks(4, [](const std::shared_ptr<comm::World>& world) { train(world); });
#pragma once

#include <functional>
#include <memory>

#include "tessera/comm/rendezvous/world.h"

namespace tessera::comm {

// Runs `body` as `size` ranks in threads of this process over one in-memory store, and returns when all ranks have
// ended. When a rank throws, the waits of the other ranks are aborted, and the first exception that is not PeerFailed
// is rethrown (PeerFailed if there is no other). Each rank gets an equal share of this process's intra-op threads
// (at::set_num_threads). Error kConfig for fewer than one rank.
void run_thread_ranks(int size, const std::function<void(std::shared_ptr<World>)>& body, WorldOptions options = {});

}  // namespace tessera::comm
