#include "tessera/train/profile/trace_recorder.h"

#include <ATen/record_function.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "tessera/comm/collectives/communication_time.h"

namespace tessera::train {
namespace {

const comm::PropagatedKind kTrace{"trace of steps"};
// Autograd's span around each node. It does no work itself, so it is not shown.
constexpr std::string_view kEngine = "autograd::engine::evaluate_function";

TraceRecorder* recorder_in_force() { return static_cast<TraceRecorder*>(comm::Propagated::innermost(kTrace)); }

// Autograd numbers the operations of each forward thread; thread and number together identify an operation.
uint64_t sequence_key(uint64_t thread, int64_t sequence) { return (thread << 48) ^ static_cast<uint64_t>(sequence); }

}  // namespace

int64_t trace_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct TraceRecorder::Frame {
  TraceKind kind = TraceKind::kOperation;
  std::string name;  // set by enter(); empty for an operation, whose name is read at its end
  int32_t module = -1;
  int64_t begin_ns = 0, children_ns = 0;
  double communicated = 0, children_communicated = 0;  // seconds
};

// Callbacks of libtorch. They get no pointer to the recorder, so it is looked up as the innermost propagated one; open
// frames are a stack per thread. A frame adds its time to its parent's children time, which gives self times.
struct TraceRecorder::Hooks {
  static std::vector<Frame>& frames() {
    thread_local std::vector<Frame> open;
    return open;
  }

  static void push(Frame frame) {
    frame.communicated = comm::communication_seconds();
    frame.begin_ns = trace_clock_ns();
    frames().push_back(std::move(frame));
  }

  static void pop(TraceRecorder& recorder, std::string_view name, bool shown) {
    const int64_t now = trace_clock_ns();
    auto& open = frames();
    if (open.empty()) return;  // the operation began before the recording
    const Frame frame = std::move(open.back());
    open.pop_back();
    const double communicated = comm::communication_seconds() - frame.communicated;
    if (!open.empty()) {
      open.back().children_ns += now - frame.begin_ns;
      open.back().children_communicated += communicated;
    }
    recorder.end(frame, frame.name.empty() ? name : frame.name, now, communicated, shown);
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
    auto* recorder = recorder_in_force();
    if (!recorder) return nullptr;
    Frame frame;
    if (!frames().empty()) frame.module = frames().back().module;
    if (call.seqNr() >= 0) {
      const std::lock_guard lock(recorder->mutex_);
      auto& modules = recorder->forward_modules_;
      // A backward function belongs to the module of the forward operation with the same thread and sequence number.
      if (call.scope() == at::RecordScope::BACKWARD_FUNCTION) {
        const auto found = modules.find(sequence_key(call.forwardThreadId(), call.seqNr()));
        if (found != modules.end()) frame.module = found->second;
      } else if (frame.module >= 0) {
        // Nested operations see the same number until one of them creates the autograd node. The last operation with a
        // number therefore overwrites earlier ones and is the one that created the node.
        modules[sequence_key(call.threadId(), call.seqNr())] = frame.module;
      }
    }
    push(std::move(frame));
    return nullptr;
  }

  static void finish(const at::RecordFunction& call, at::ObserverContext*) {
    auto* recorder = recorder_in_force();
    if (!recorder) return;
    const std::string_view name = call.name();
    pop(*recorder, name, !name.starts_with(kEngine));
  }
};

TraceRecorder::~TraceRecorder() { stop(); }

void TraceRecorder::start() {
  if (scope_) return;
  Hooks::frames().clear();
  {
    const std::lock_guard lock(mutex_);
    threads_.emplace(static_cast<uint64_t>(::syscall(SYS_gettid)), 0);
  }
  scope_ = std::make_unique<comm::Propagated>(kTrace, this);
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&Hooks::begin, &Hooks::finish)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
}

void TraceRecorder::stop() {
  if (!scope_) return;
  at::removeCallback(handle_);
  scope_.reset();
  Hooks::frames().clear();
}

void TraceRecorder::enter(TraceKind kind, std::string_view name) {
  Frame frame{.kind = kind, .name = std::string(name)};
  if (kind == TraceKind::kModule) {
    const std::lock_guard lock(mutex_);
    frame.module = static_cast<int32_t>(id_of(name));
  } else if (!Hooks::frames().empty()) {
    frame.module = Hooks::frames().back().module;
  }
  Hooks::push(std::move(frame));
}

void TraceRecorder::leave() { Hooks::pop(*this, "", true); }

uint32_t TraceRecorder::id_of(std::string_view name) {
  const auto [found, fresh] = ids_.emplace(name, static_cast<uint32_t>(names_.size()));
  if (fresh) names_.emplace_back(name);
  return found->second;
}

// Adds a finished frame to the totals, and to the events if it is `shown`. Totals come first: they count events that
// are dropped.
void TraceRecorder::end(const Frame& frame, std::string_view name, int64_t now_ns, double communicated, bool shown) {
  const int64_t duration = now_ns - frame.begin_ns;
  const double own = static_cast<double>(duration - frame.children_ns) * 1e-9 -
                     std::max(communicated - frame.children_communicated, 0.0);
  const std::lock_guard lock(mutex_);
  if (frame.kind != TraceKind::kPart && frame.module >= 0) {
    auto& totals = modules_[static_cast<uint32_t>(frame.module)];
    totals.calls += frame.kind == TraceKind::kModule;
    totals.seconds += std::max(own, 0.0);
  }
  if (!shown) return;
  const uint32_t id = id_of(name);
  if (frame.kind == TraceKind::kOperation) {
    auto& totals = operations_[id];
    ++totals.calls;
    totals.seconds += std::max(own, 0.0);
  }
  if (events_.size() >= most_events_) {
    ++dropped_;
    return;
  }
  const auto thread = threads_.emplace(static_cast<uint64_t>(::syscall(SYS_gettid)), threads_.size()).first->second;
  events_.push_back({frame.kind, id, frame.module, thread, frame.begin_ns, duration});
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
