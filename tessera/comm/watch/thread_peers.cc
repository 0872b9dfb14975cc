#include "tessera/comm/watch/thread_peers.h"

namespace tessera::comm {

void ThreadRoom::enter(int rank, PeerListener& listener) {
  const std::lock_guard lock(mutex_);
  present_[rank] = &listener;
}

void ThreadRoom::leave(int rank) {
  const std::lock_guard lock(mutex_);
  if (present_.erase(rank)) left_.insert(rank);
}

// A connection that broke is that of a thread which throws: its exception says why, not we.
bool ThreadRoom::report_trouble(int rank, const Trouble& trouble) {
  const std::lock_guard lock(mutex_);
  if (settled_) return true;
  if (!trouble.timed_out) return false;
  settled_ = true;
  std::vector<FlightRecord> records;
  for (const auto& [peer, listener] : present_) records.push_back(listener->where(trouble.group, trouble.sequence));
  const Verdict verdict = judge(records, left_, trouble, rank);
  for (const auto& [peer, listener] : present_) listener->hear(verdict);
  return true;
}

ThreadPeers::ThreadPeers(std::shared_ptr<ThreadRoom> room, int rank, PeerListener& listener)
    : room_(std::move(room)), rank_(rank) {
  room_->enter(rank_, listener);
}

bool ThreadPeers::report_trouble(const Trouble& trouble) { return room_->report_trouble(rank_, trouble); }

void ThreadPeers::leave(bool) noexcept {
  if (room_) room_->leave(rank_);
  room_.reset();
}

}  // namespace tessera::comm
