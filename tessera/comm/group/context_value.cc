#include "tessera/comm/group/context_value.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <string_view>
#include <type_traits>

namespace tessera::comm {

namespace {

constexpr std::string_view kSlotName = "tessera";

// The kind under which libtorch keeps our entry in its thread-local debug info. DebugInfoKind is an enumeration until
// torch 2.12 and a class made from a name after that; 0x54 is a value that libtorch does not use.
template <class Kind>
Kind own_kind() {
  if constexpr (std::is_enum_v<Kind>) {
    return static_cast<Kind>(0x54);
  } else {
    return Kind(&kSlotName);
  }
}

const c10::DebugInfoKind& slot() {
  static const auto kind = own_kind<c10::DebugInfoKind>();
  return kind;
}

}  // namespace

// An entry (frame) of the linked list of scopes; each entry stands for one scope. libtorch copies the pointer to the
// innermost frame to other threads, so several threads may share a frame, and a frame may outlive its scope.
struct ContextValue::ScopeFrame final : c10::DebugInfoBase, std::enable_shared_from_this<ContextValue::ScopeFrame> {
  const ContextKey* kind = nullptr;
  std::atomic<void*> value{nullptr};  // null once the scope has ended: other threads may still hold the frame
  std::shared_ptr<ScopeFrame> outer;
  std::shared_ptr<c10::ThreadLocalDebugInfo> before;  // state of the thread when the scope began
  const c10::ThreadLocalDebugInfo* own = nullptr;     // libtorch's entry that holds this frame

  static ScopeFrame* current() noexcept { return static_cast<ScopeFrame*>(c10::ThreadLocalDebugInfo::get(slot())); }
};

ContextValue::ContextValue(const ContextKey& kind, void* value) : frame_(std::make_shared<ScopeFrame>()) {
  using c10::ThreadLocalDebugInfo;
  frame_->kind = &kind;
  frame_->value = value;
  frame_->before = ThreadLocalDebugInfo::current();
  if (ScopeFrame* outer = ScopeFrame::current()) frame_->outer = outer->shared_from_this();
  ThreadLocalDebugInfo::_push(slot(), frame_);
  frame_->own = ThreadLocalDebugInfo::current().get();
}

// Ends this scope. If an inner scope still exists, the frame of this scope only loses its value here, and is removed
// once the frames of all inner scopes have been removed. Otherwise this frame is removed, and with it the frames around
// it whose scopes have ended already. A frame is removed by restoring libtorch's debug info from before the frame. This
// is done only while the entry of the frame is the newest in libtorch's debug info, because other code may have pushed
// an entry after it.
ContextValue::~ContextValue() {
  frame_->value = nullptr;
  for (;;) {
    ScopeFrame* top = ScopeFrame::current();
    if (top == nullptr || top->value.load() != nullptr || c10::ThreadLocalDebugInfo::current().get() != top->own) {
      return;
    }
    auto before = top->before;
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before));
  }
}

void* ContextValue::innermost(const ContextKey& kind) noexcept {
  for (const ScopeFrame* frame = ScopeFrame::current(); frame != nullptr; frame = frame->outer.get()) {
    void* value = frame->value.load();
    if (frame->kind == &kind && value != nullptr) return value;
  }
  return nullptr;
}

void ContextValue::for_each(const ContextKey& kind, const std::function<void(void*)>& visit) {
  for (const ScopeFrame* frame = ScopeFrame::current(); frame != nullptr; frame = frame->outer.get()) {
    void* value = frame->value.load();
    if (frame->kind == &kind && value != nullptr) visit(value);
  }
}

}  // namespace tessera::comm
