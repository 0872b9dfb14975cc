#include "tessera/train/profile/trace_recorder.h"

#include <ATen/record_function.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "tessera/comm/collectives/communication_time.h"

namespace tessera::train {
namespace {

const comm::ContextKey kTrace{"trace of steps"};
// The name of the event that autograd's engine records around each node. The engine does no work of its own there, so
// the event is not shown.
constexpr std::string_view kEngine = "autograd::engine::evaluate_function";

TraceRecorder* current_recorder() { return static_cast<TraceRecorder*>(comm::ContextValue::innermost(kTrace)); }

// Autograd numbers the operations of each forward thread; thread and number together identify an operation.
uint64_t sequence_key(uint64_t thread, int64_t sequence) { return (thread << 48) ^ static_cast<uint64_t>(sequence); }

}  // namespace

int64_t trace_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct TraceRecorder::OpenEvent {
  TraceKind kind = TraceKind::kOperation;
  std::string name;  // set by begin_event(); empty for an operation, whose name is read at its end
  int32_t module = -1;
  int64_t begin_ns = 0, children_ns = 0;
  double communicated = 0, children_communicated = 0;  // seconds
};

// Callbacks for at::RecordFunction. They get no pointer to the recorder, so current_recorder() looks it up: the
// innermost recorder in force on this thread. Each thread has a stack of open events. An event adds its duration to
// children_ns of the event around it, from which self times are computed.
struct TraceRecorder::RecordFunctionCallbacks {
  static std::vector<OpenEvent>& open_events() {
    thread_local std::vector<OpenEvent> open;
    return open;
  }

  static void push(OpenEvent event) {
    event.communicated = comm::communication_seconds();
    event.begin_ns = trace_clock_ns();
    open_events().push_back(std::move(event));
  }

  static void pop(TraceRecorder& recorder, std::string_view name, bool shown) {
    const int64_t now = trace_clock_ns();
    auto& open = open_events();
    if (open.empty()) return;  // the operation began before the recording
    const OpenEvent event = std::move(open.back());
    open.pop_back();
    const double communicated = comm::communication_seconds() - event.communicated;
    if (!open.empty()) {
      open.back().children_ns += now - event.begin_ns;
      open.back().children_communicated += communicated;
    }
    recorder.end(event, event.name.empty() ? name : event.name, now, communicated, shown);
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    auto* recorder = current_recorder();
    if (!recorder) return nullptr;
    OpenEvent event;
    if (!open_events().empty()) event.module = open_events().back().module;
    if (call.seqNr() >= 0) {
      const std::lock_guard lock(recorder->mutex_);
      auto& modules = recorder->forward_modules_;
      // A backward function belongs to the module of the forward operation with the same thread and sequence number.
      if (call.scope() == at::RecordScope::BACKWARD_FUNCTION) {
        const auto found = modules.find(sequence_key(call.forwardThreadId(), call.seqNr()));
        if (found != modules.end()) event.module = found->second;
      } else if (event.module >= 0) {
        // Nested operations have the same sequence number until one of them creates the autograd node. So each
        // operation overwrites the entry of an earlier operation with the same number: the last one is the operation
        // that created the node.
        modules[sequence_key(call.threadId(), call.seqNr())] = event.module;
      }
    }
    push(std::move(event));
    return nullptr;
  }

  static void finish(const at::RecordFunction& call, at::ObserverContext*) {
    auto* recorder = current_recorder();
    if (!recorder) return;
    const std::string_view name = call.name();
    pop(*recorder, name, !name.starts_with(kEngine));
  }
};

TraceRecorder::~TraceRecorder() { stop(); }

void TraceRecorder::start() {
  if (scope_) return;
  RecordFunctionCallbacks::open_events().clear();
  {
    const std::lock_guard lock(mutex_);
    threads_.emplace(static_cast<uint64_t>(::syscall(SYS_gettid)), 0);
  }
  scope_ = std::make_unique<comm::ContextValue>(kTrace, this);
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&RecordFunctionCallbacks::begin, &RecordFunctionCallbacks::finish)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
}

void TraceRecorder::stop() {
  if (!scope_) return;
  at::removeCallback(handle_);
  scope_.reset();
  RecordFunctionCallbacks::open_events().clear();
}

void TraceRecorder::begin_event(TraceKind kind, std::string_view name) {
  OpenEvent event{.kind = kind, .name = std::string(name)};
  if (kind == TraceKind::kModule) {
    const std::lock_guard lock(mutex_);
    event.module = static_cast<int32_t>(id_of(name));
  } else if (!RecordFunctionCallbacks::open_events().empty()) {
    event.module = RecordFunctionCallbacks::open_events().back().module;
  }
  RecordFunctionCallbacks::push(std::move(event));
}

void TraceRecorder::end_event() { RecordFunctionCallbacks::pop(*this, "", true); }

uint32_t TraceRecorder::id_of(std::string_view name) {
  const auto [found, fresh] = ids_.emplace(name, static_cast<uint32_t>(names_.size()));
  if (fresh) names_.emplace_back(name);
  return found->second;
}

// Adds a finished event, unless it is a span, to the totals of its module. If the event is `shown`, also adds it to the
// totals of its operation and to events_. The totals are updated first, so that they include events that are dropped
// because events_ is full.
void TraceRecorder::end(const OpenEvent& event, std::string_view name, int64_t now_ns, double communicated,
                        bool shown) {
  const int64_t duration = now_ns - event.begin_ns;
  const double own = static_cast<double>(duration - event.children_ns) * 1e-9 -
                     std::max(communicated - event.children_communicated, 0.0);
  const std::lock_guard lock(mutex_);
  if (event.kind != TraceKind::kSpan && event.module >= 0) {
    auto& totals = modules_[static_cast<uint32_t>(event.module)];
    totals.calls += event.kind == TraceKind::kModule;
    totals.seconds += std::max(own, 0.0);
  }
  if (!shown) return;
  const uint32_t id = id_of(name);
  if (event.kind == TraceKind::kOperation) {
    auto& totals = operations_[id];
    ++totals.calls;
    totals.seconds += std::max(own, 0.0);
  }
  if (events_.size() >= max_events_) {
    ++dropped_;
    return;
  }
  const auto thread = threads_.emplace(static_cast<uint64_t>(::syscall(SYS_gettid)), threads_.size()).first->second;
  events_.push_back({event.kind, id, event.module, thread, event.begin_ns, duration});
}

std::vector<TraceEvent> TraceRecorder::events() const {
  const std::lock_guard lock(mutex_);
  return events_;
}

std::string TraceRecorder::name(uint32_t id) const {
  const std::lock_guard lock(mutex_);
  return names_.at(id);
}

int64_t TraceRecorder::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

std::map<std::string, TraceTotals> TraceRecorder::by_name(
    const std::unordered_map<uint32_t, TraceTotals>& by_id) const {
  const std::lock_guard lock(mutex_);
  std::map<std::string, TraceTotals> out;
  for (const auto& [id, totals] : by_id) out[names_.at(id)] = totals;
  return out;
}

}  // namespace tessera::train
