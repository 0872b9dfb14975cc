#include "tessera/comm/group/propagated.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <string_view>
#include <type_traits>

namespace tessera::comm {

namespace {

constexpr std::string_view kSlotName = "tessera";

// Ours among what libtorch carries along; an enumeration until torch 2.12.
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

struct Propagated::Frame final : c10::DebugInfoBase, std::enable_shared_from_this<Propagated::Frame> {
  const PropagatedKind* kind = nullptr;
  std::atomic<void*> value{nullptr};  // null once the scope has ended, for those who still hold the frame
  std::shared_ptr<Frame> outer;
  std::shared_ptr<c10::ThreadLocalDebugInfo> before;
  const c10::ThreadLocalDebugInfo* own = nullptr;  // which holds this

  static Frame* current() noexcept { return static_cast<Frame*>(c10::ThreadLocalDebugInfo::get(slot())); }
};

Propagated::Propagated(const PropagatedKind& kind, void* value) : frame_(std::make_shared<Frame>()) {
  using c10::ThreadLocalDebugInfo;
  frame_->kind = &kind;
  frame_->value = value;
  frame_->before = ThreadLocalDebugInfo::current();
  if (Frame* outer = Frame::current()) frame_->outer = outer->shared_from_this();
  ThreadLocalDebugInfo::_push(slot(), frame_);
  frame_->own = ThreadLocalDebugInfo::current().get();
}

// What is on top goes, and with it what ended before it did. A scope that is not on top stays without a value.
Propagated::~Propagated() {
  frame_->value = nullptr;
  for (;;) {
    Frame* top = Frame::current();
    if (top == nullptr || top->value.load() != nullptr || c10::ThreadLocalDebugInfo::current().get() != top->own) {
      return;
    }
    auto before = top->before;
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before));
  }
}

void* Propagated::innermost(const PropagatedKind& kind) noexcept {
  for (const Frame* frame = Frame::current(); frame != nullptr; frame = frame->outer.get()) {
    void* value = frame->value.load();
    if (frame->kind == &kind && value != nullptr) return value;
  }
  return nullptr;
}

void Propagated::for_each(const PropagatedKind& kind, const std::function<void(void*)>& visit) {
  for (const Frame* frame = Frame::current(); frame != nullptr; frame = frame->outer.get()) {
    void* value = frame->value.load();
    if (frame->kind == &kind && value != nullptr) visit(value);
  }
}

}  // namespace tessera::comm
