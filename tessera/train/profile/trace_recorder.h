// Records the work of one rank's training thread with its times: operations of libtorch in forward and backward, calls
// of modules, and spans that the program names (TraceSpan).
//
//   TraceRecorder recorder;
//   recorder.start();                                     // from here on operations are recorded
//   { const TraceSpan span(&recorder, "data"); load(); }
//   recorder.stop();                                      // on the same thread
//   recorder.operations();                                // calls and self time by name
//
// Threads that run a backward for the recorded thread are recorded, too. Recording costs about a microsecond per
// operation; a stopped recorder costs nothing. start() and stop() must be called on one thread; all other functions are
// thread-safe. Times are host times: for an accelerator they are the times to launch kernels.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/comm/group/context_value.h"

namespace tessera::train {

enum class TraceKind : uint8_t { kSpan, kModule, kOperation };

struct TraceEvent {
  TraceKind kind = TraceKind::kOperation;
  uint32_t name = 0;                      // id for TraceRecorder::name()
  int32_t module = -1;                    // id of the name of the innermost module around the event; -1: none
  uint32_t thread = 0;                    // 0: the thread that called start()
  int64_t begin_ns = 0, duration_ns = 0;  // steady clock
};

struct TraceTotals {
  int64_t calls = 0;
  double seconds = 0;  // self time: without nested operations and without collectives
};

class TraceRecorder {
 public:
  static constexpr size_t kMaxEvents = 200'000;  // about 25 MB of JSON

  explicit TraceRecorder(size_t max_events = kMaxEvents) : max_events_(max_events) {}
  ~TraceRecorder();  // calls stop(), so it must run on the thread that called start()
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  void start();
  void stop();
  bool recording() const { return scope_ != nullptr; }

  // Begin and end an event on this thread. Calls must be nested like function calls.
  void begin_event(TraceKind kind, std::string_view name);
  void end_event();

  std::vector<TraceEvent> events() const;
  std::string name(uint32_t id) const;
  int64_t dropped() const;  // events that were not kept because of max_events; the totals count them
  std::map<std::string, TraceTotals> operations() const { return by_name(operations_); }
  // Calls and self time of modules, by module name. The self time of a module includes that of the operations, in
  // forward and backward, whose innermost module it is. A backward operation has the module of its forward operation.
  std::map<std::string, TraceTotals> modules() const { return by_name(modules_); }

 private:
  struct RecordFunctionCallbacks;
  struct OpenEvent;
  uint32_t id_of(std::string_view name);  // mutex_ is held
  std::map<std::string, TraceTotals> by_name(const std::unordered_map<uint32_t, TraceTotals>& by_id) const;
  void end(const OpenEvent& event, std::string_view name, int64_t now_ns, double communicated, bool shown);

  const size_t max_events_;
  uint64_t handle_ = 0;                        // of libtorch's callback
  std::unique_ptr<comm::ContextValue> scope_;  // makes this recorder visible to backward threads; null: stopped

  mutable std::mutex mutex_;  // guards all members below
  std::vector<std::string> names_;
  std::unordered_map<std::string, uint32_t> ids_;
  std::vector<TraceEvent> events_;
  int64_t dropped_ = 0;
  std::unordered_map<uint32_t, TraceTotals> operations_, modules_;
  std::unordered_map<uint64_t, int32_t> forward_modules_;  // module of a forward operation, by sequence_key()
  std::unordered_map<uint64_t, uint32_t> threads_;
};

// A named span of this thread, from constructor to destructor. A null or stopped recorder records nothing.
class TraceSpan {
 public:
  TraceSpan(TraceRecorder* recorder, std::string_view name)
      : recorder_(recorder && recorder->recording() ? recorder : nullptr) {
    if (recorder_) recorder_->begin_event(TraceKind::kSpan, name);
  }
  ~TraceSpan() {
    if (recorder_) recorder_->end_event();
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  TraceRecorder* recorder_;
};

int64_t trace_clock_ns();  // steady clock

}  // namespace tessera::train
