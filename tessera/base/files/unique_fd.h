// Owns a file descriptor and closes it in the destructor.
//
//   const UniqueFd file(::open(path, O_RDONLY | O_CLOEXEC));
//   if (!file.open()) raise(...);
//   ::read(file.get(), ...);
//
// Movable, not copyable. Not thread-safe.
#pragma once

#include <unistd.h>

#include <utility>

namespace tessera {

class UniqueFd {
 public:
  explicit UniqueFd(int descriptor = -1) noexcept : descriptor_(descriptor) {}
  ~UniqueFd() { reset(); }
  UniqueFd(UniqueFd&& other) noexcept : descriptor_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }

  int get() const noexcept { return descriptor_; }
  bool open() const noexcept { return descriptor_ >= 0; }
  // Gives up ownership: the caller must close the descriptor.
  int release() noexcept { return std::exchange(descriptor_, -1); }
  void reset(int descriptor = -1) noexcept {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = descriptor;
  }

 private:
  int descriptor_;
};

}  // namespace tessera
