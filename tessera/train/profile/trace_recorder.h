// What one rank's thread does while it is recorded, and for how long: operations of libtorch, forward and backward, the
// calls of modules, and stretches that are named by hand.
//
//   TraceRecorder recorder;
//   recorder.start();                                     // from here on operations are recorded
//   { const TraceSpan span(&recorder, "data"); load(); }
//   recorder.stop();                                      // on the same thread
//   recorder.operations();                                // calls and own seconds by name
//
// Threads that run a backward for the recorded one are recorded, too. An operation costs about a microsecond while it
// is recorded; otherwise nothing is in its way. start() and stop() belong to one thread, the rest is thread-safe. Times
// are the host's: of an accelerator, what it takes to start its work.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/comm/group/propagated.h"

namespace tessera::train {

enum class TraceKind : uint8_t { kPart, kModule, kOperation };

struct TraceEvent {
  TraceKind kind = TraceKind::kOperation;
  uint32_t name = 0;                      // of TraceRecorder::name()
  int32_t module = -1;                    // the same, of the innermost module that it belongs to; -1: none
  uint32_t thread = 0;                    // 0: the one that start() was called on
  int64_t begin_ns = 0, duration_ns = 0;  // of the steady clock
};

struct TraceTotals {
  int64_t calls = 0;
  double seconds = 0;  // without what it called in turn, and without collectives
};

class TraceRecorder {
 public:
  static constexpr size_t kMostEvents = 200'000;  // about 25 MB of JSON

  explicit TraceRecorder(size_t most_events = kMostEvents) : most_events_(most_events) {}
  ~TraceRecorder();  // stops, on the thread that started
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  void start();
  void stop();
  bool recording() const { return scope_ != nullptr; }

  // Of this thread; pairs lie within one another as calls do.
  void enter(TraceKind kind, std::string_view name);
  void leave();

  std::vector<TraceEvent> events() const;
  std::string name(uint32_t id) const;
  int64_t dropped() const;  // events beyond the most; totals count them
  std::map<std::string, TraceTotals> operations() const { return by_name(operations_); }
  // By innermost module, forward and backward.
  std::map<std::string, TraceTotals> modules() const { return by_name(modules_); }

 private:
  struct Hooks;
  struct Frame;
  uint32_t id_of(std::string_view name);  // mutex_ is held
  std::map<std::string, TraceTotals> by_name(const std::unordered_map<uint32_t, TraceTotals>& by_id) const;
  void end(const Frame& frame, std::string_view name, int64_t now_ns, double communicated, bool shown);

  const size_t most_events_;
  uint64_t handle_ = 0;  // libtorch's
  std::unique_ptr<comm::Propagated> scope_;

  mutable std::mutex mutex_;  // of what follows
  std::vector<std::string> names_;
  std::unordered_map<std::string, uint32_t> ids_;
  std::vector<TraceEvent> events_;
  int64_t dropped_ = 0;
  std::unordered_map<uint32_t, TraceTotals> operations_, modules_;
  std::unordered_map<uint64_t, int32_t> forward_modules_;  // by sequence number of autograd's
  std::unordered_map<uint64_t, uint32_t> threads_;
};

// A stretch of this thread; a recorder that is null or at rest records nothing.
class TraceSpan {
 public:
  TraceSpan(TraceRecorder* recorder, std::string_view name)
      : recorder_(recorder && recorder->recording() ? recorder : nullptr) {
    if (recorder_) recorder_->enter(TraceKind::kPart, name);
  }
  ~TraceSpan() {
    if (recorder_) recorder_->leave();
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  TraceRecorder* recorder_;
};

int64_t trace_clock_ns();

}  // namespace tessera::train
