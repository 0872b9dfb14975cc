// Flight recorder: keeps the last 2,000 collectives of one rank, with times and state, in a ring buffer. A collective
// costs two locks and a copy, well under 1 us.
//
//   const uint64_t ticket = recorder.start(signature);
//   recorder.mark(ticket, CallState::kFinished);
//   publish_file(path, to_json(recorder.record("SIGUSR2")));
//
// Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/watch/flight_record.h"

namespace tessera::comm {

class FlightRecorder {
 public:
  static constexpr size_t kCapacity = 2000;

  FlightRecorder(int rank, int world_size, size_t capacity = kCapacity);

  void add_group(FlightGroup group);
  // Records a new call; returns its ticket, the number of the call for mark().
  uint64_t start(const Signature& signature);
  // Sets state and time of a call. Does nothing for a call that has left the ring buffer.
  void mark(uint64_t ticket, CallState state);
  // Sets the state of a call back to kStarted and clears the time at which the rank began to wait in the call. Does
  // nothing for a call that has left the ring buffer.
  void unmark_wait(uint64_t ticket);
  std::optional<Signature> signature(uint64_t ticket) const;
  // Start of the longest wait that is going on; nullopt when the rank waits in no call.
  std::optional<std::chrono::steady_clock::time_point> oldest_wait() const;

  FlightRecord record(const std::string& reason) const;
  // A record of a few kilobytes for a diagnosis: call `sequence` of a group, the group's last call, calls under way,
  // and the last few calls; at most 16 calls where possible.
  FlightRecord summary(uint32_t group, uint64_t sequence) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct RecordedCall {
    Signature signature;
    CallState state = CallState::kFinished;
    Clock::time_point started{}, waiting{}, finished{};
  };
  bool has(uint64_t ticket) const { return ticket < made_ && made_ - ticket <= ring_.size(); }
  template <class Keep>
  FlightRecord select(const std::string& reason, const Keep& keep) const;

  const int rank_, world_size_;
  mutable std::mutex mutex_;
  std::vector<RecordedCall> ring_;  // call `ticket` is at ticket % size
  uint64_t made_ = 0;               // number of calls so far
  std::vector<FlightGroup> groups_;
};

}  // namespace tessera::comm
