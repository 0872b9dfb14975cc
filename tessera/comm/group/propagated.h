// A context variable: a value that functions find without a parameter while a scope object lives. The value is visible
// on the thread of the scope, and on the threads to which libtorch copies its thread-local state, such as the threads
// of a backward pass on an accelerator.
//
//   const PropagatedKind kVerbose{"verbose"};        // identified by its address
//   int level = 3;
//   const Propagated scope(kVerbose, &level);        // until the scope is destroyed
//   Propagated::innermost(kVerbose);                 // &level, also in backward hooks that run during the scope
//
// A scope must be destroyed on the thread that made it, usually in reverse order of construction. Several threads may
// use the value at once, because a backward pass may run on several devices. No communication.
#pragma once

#include <functional>
#include <memory>

namespace tessera::comm {

struct PropagatedKind {
  const char* name;
};

class Propagated {
 public:
  // `value` must outlive the scope.
  Propagated(const PropagatedKind& kind, void* value);
  ~Propagated();
  Propagated(const Propagated&) = delete;
  Propagated& operator=(const Propagated&) = delete;

  // Returns the value of the innermost scope of this kind, null when there is none.
  static void* innermost(const PropagatedKind& kind) noexcept;
  // Calls `visit` with the value of each scope of this kind, innermost first.
  static void for_each(const PropagatedKind& kind, const std::function<void(void*)>& visit);

 private:
  struct Frame;
  std::shared_ptr<Frame> frame_;
};

}  // namespace tessera::comm
