#include "tessera/comm/watch/flight_recorder.h"

#include <unistd.h>

#include <algorithm>

#include "tessera/base/machine/host.h"

namespace tessera::comm {
namespace {

constexpr size_t kSummaryCalls = 16;

int64_t microseconds(std::chrono::nanoseconds duration) {
  return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
}

}  // namespace

FlightRecorder::FlightRecorder(int rank, int world_size, size_t capacity)
    : rank_(rank), world_size_(world_size), ring_(std::max<size_t>(capacity, 1)) {}

void FlightRecorder::add_group(FlightGroup group) {
  const std::lock_guard lock(mutex_);
  groups_.push_back(std::move(group));
}

// Tickets count from 0. The entry of a ticket is overwritten `ring_.size()` calls later, which has() detects.
uint64_t FlightRecorder::start(const Signature& signature) {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  RecordedCall& entry = ring_[made_ % ring_.size()];
  entry.signature = signature;
  entry.state = CallState::kStarted;
  entry.started = now;
  entry.waiting = entry.finished = {};
  return made_++;
}

void FlightRecorder::mark(uint64_t ticket, CallState state) {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (!has(ticket)) return;
  RecordedCall& entry = ring_[ticket % ring_.size()];
  entry.state = state;
  if (state == CallState::kWaiting) entry.waiting = now;
  if (state == CallState::kFinished || state == CallState::kFailed) entry.finished = now;
}

void FlightRecorder::unmark_wait(uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  if (!has(ticket)) return;
  ring_[ticket % ring_.size()].state = CallState::kStarted;
  ring_[ticket % ring_.size()].waiting = {};
}

std::optional<Signature> FlightRecorder::signature(uint64_t ticket) const {
  const std::lock_guard lock(mutex_);
  if (!has(ticket)) return std::nullopt;
  return ring_[ticket % ring_.size()].signature;
}

std::optional<std::chrono::steady_clock::time_point> FlightRecorder::oldest_wait() const {
  const std::lock_guard lock(mutex_);
  std::optional<Clock::time_point> oldest;
  for (const RecordedCall& entry : ring_) {
    if (entry.state == CallState::kWaiting) oldest = std::min(oldest.value_or(entry.waiting), entry.waiting);
  }
  return oldest;
}

// Makes a record of the calls for which keep(entry, ticket) is true, and of the groups that these calls belong to.
// Times are kept on the steady clock and converted here to the system clock, relative to the present.
template <class Keep>
FlightRecord FlightRecorder::select(const std::string& reason, const Keep& keep) const {
  const auto now = Clock::now();
  FlightRecord result;
  result.rank = rank_;
  result.world_size = world_size_;
  result.host = host_name();
  result.pid = ::getpid();
  result.reason = reason;
  result.written_us = microseconds(std::chrono::system_clock::now().time_since_epoch());
  const auto moment = [&](Clock::time_point time) {
    return time == Clock::time_point() ? 0 : result.written_us - microseconds(now - time);
  };
  const std::lock_guard lock(mutex_);
  result.calls_made = made_;
  for (uint64_t ticket = made_ - std::min<uint64_t>(made_, ring_.size()); ticket < made_; ++ticket) {
    const RecordedCall& entry = ring_[ticket % ring_.size()];
    if (!keep(entry, ticket)) continue;
    result.calls.push_back(
        {entry.signature, entry.state, moment(entry.started), moment(entry.waiting), moment(entry.finished)});
  }
  for (const FlightGroup& group : groups_) {
    if (std::ranges::any_of(result.calls, [&](const auto& call) { return call.signature.members == group.id; })) {
      result.groups.push_back(group);
    }
  }
  return result;
}

FlightRecord FlightRecorder::record(const std::string& reason) const {
  return select(reason, [](const RecordedCall&, uint64_t) { return true; });
}

// Selects the calls that diagnose() can need. If they are more than 16, the oldest ones are dropped, but never call
// `sequence` and the group's last call, since a diagnosis compares these two.
FlightRecord FlightRecorder::summary(uint32_t group, uint64_t sequence) const {
  uint64_t last = 0;
  FlightRecord result = select("asked", [&](const RecordedCall& entry, uint64_t ticket) {
    const bool here = entry.signature.members == group && !is_message(entry.signature.op);
    if (here) last = std::max(last, entry.signature.sequence);
    return ticket + 4 >= made_ || entry.state == CallState::kStarted || entry.state == CallState::kWaiting ||
           (here && entry.signature.sequence + 2 >= sequence);
  });
  const auto dispensable = [&](const FlightCall& call) {
    return call.signature.members != group || (call.signature.sequence != sequence && call.signature.sequence != last);
  };
  while (result.calls.size() > kSummaryCalls) {  // oldest first
    const auto found = std::ranges::find_if(result.calls, dispensable);
    if (found == result.calls.end()) break;
    result.calls.erase(found);
  }
  return result;
}

}  // namespace tessera::comm
