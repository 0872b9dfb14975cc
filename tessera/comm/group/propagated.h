// Values that are in force for all that is called while a scope lives: on its thread, and on those threads to which
// libtorch carries a thread's state, as it does for a backward pass on an accelerator.
//
//   const PropagatedKind kVerbose{"verbose"};        // its address is its name
//   int level = 3;
//   const Propagated scope(kVerbose, &level);        // until it is destroyed
//   Propagated::innermost(kVerbose);                 // &level, also in the backward hooks of this scope
//
// Scopes end on the thread that made them, usually in the reverse order. A value must be ready to be used from several
// threads, one backward being at work on several devices. No communication.
#pragma once

#include <functional>
#include <memory>

namespace tessera::comm {

struct PropagatedKind {
  const char* name;
};

class Propagated {
 public:
  // The value must outlive this.
  Propagated(const PropagatedKind& kind, void* value);
  ~Propagated();
  Propagated(const Propagated&) = delete;
  Propagated& operator=(const Propagated&) = delete;

  // Null when no scope of the kind lives.
  static void* innermost(const PropagatedKind& kind) noexcept;
  // Innermost first.
  static void for_each(const PropagatedKind& kind, const std::function<void(void*)>& visit);

 private:
  struct Frame;
  std::shared_ptr<Frame> frame_;
};

}  // namespace tessera::comm
