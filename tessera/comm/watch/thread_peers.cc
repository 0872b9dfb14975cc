#include "tessera/comm/watch/thread_peers.h"

namespace tessera::comm {

ThreadPeers::ThreadPeers(std::shared_ptr<ThreadRoom> room, int rank, PeerListener& listener)
    : room_(std::move(room)), rank_(rank) {
  const std::lock_guard lock(room_->mutex);
  room_->present[rank_] = &listener;
}

// Only time-outs are diagnosed. A broken connection means that another thread has thrown, and run_thread_ranks()
// rethrows that thread's exception.
bool ThreadPeers::report_trouble(const Trouble& trouble) {
  const std::lock_guard lock(room_->mutex);
  if (room_->settled) return true;
  if (!trouble.timed_out) return false;
  room_->settled = true;
  std::vector<FlightRecord> records;
  for (const auto& [peer, listener] : room_->present) {
    records.push_back(listener->where(trouble.group, trouble.sequence));
  }
  const Verdict verdict = judge(records, room_->left, trouble, rank_);
  for (const auto& [peer, listener] : room_->present) listener->hear(verdict);
  return true;
}

void ThreadPeers::leave(bool) noexcept {
  if (!room_) return;
  {
    const std::lock_guard lock(room_->mutex);
    room_->present.erase(rank_);
    room_->left.insert(rank_);
  }
  room_.reset();
}

}  // namespace tessera::comm
