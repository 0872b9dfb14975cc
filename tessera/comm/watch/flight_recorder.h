// The last 2,000 collectives of one rank, with times and state. A call costs two locks and a copy: well under 1 us.
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
  // The number that mark() knows the call by.
  uint64_t start(const Signature& signature);
  // Of a call that has left the ring: nothing.
  void mark(uint64_t ticket, CallState state);
  // kStarted again, as if the rank had not waited in it yet.
  void unmark_wait(uint64_t ticket);
  std::optional<Signature> signature(uint64_t ticket) const;
  // Since when the call is waited for that has been so for the longest.
  std::optional<std::chrono::steady_clock::time_point> oldest_wait() const;

  FlightRecord record(const std::string& reason) const;
  // What tells where this rank is, in a few kilobytes: the call `sequence` of a group, the last one there, calls under
  // way and the last few.
  FlightRecord summary(uint32_t group, uint64_t sequence) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    Signature signature;
    CallState state = CallState::kFinished;
    Clock::time_point started{}, waiting{}, finished{};
  };
  bool has(uint64_t ticket) const { return ticket < made_ && made_ - ticket <= ring_.size(); }
  template <class Keep>
  FlightRecord select(const std::string& reason, const Keep& keep) const;

  const int rank_, world_size_;
  mutable std::mutex mutex_;
  std::vector<Entry> ring_;
  uint64_t made_ = 0;
  std::vector<FlightGroup> groups_;
};

}  // namespace tessera::comm
