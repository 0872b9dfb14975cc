// A context variable: a value that functions find without a parameter while a scope object lives. The value is visible
// on the thread of the scope, and on the threads to which libtorch copies its thread-local state, such as the threads
// of a backward pass on an accelerator.
//
//   const ContextKey kVerbose{"verbose"};          // identified by its address
//   int level = 3;
//   const ContextValue scope(kVerbose, &level);    // until the scope is destroyed
//   ContextValue::innermost(kVerbose);             // &level, also in backward hooks that run during the scope
//
// A scope must be destroyed on the thread that made it, usually in reverse order of construction. Several threads may
// use the value at once, because a backward pass may run on several devices. No communication.
#pragma once

#include <functional>
#include <memory>

namespace tessera::comm {

struct ContextKey {
  const char* name;
};

class ContextValue {
 public:
  // `value` must outlive the scope.
  ContextValue(const ContextKey& kind, void* value);
  ~ContextValue();
  ContextValue(const ContextValue&) = delete;
  ContextValue& operator=(const ContextValue&) = delete;

  // Returns the value of the innermost scope that was made with the key `kind`, null when there is none.
  static void* innermost(const ContextKey& kind) noexcept;
  // Calls `visit` with the value of each scope of this kind, innermost first.
  static void for_each(const ContextKey& kind, const std::function<void(void*)>& visit);

 private:
  struct ScopeFrame;
  std::shared_ptr<ScopeFrame> frame_;
};

}  // namespace tessera::comm
