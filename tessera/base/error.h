// The one error type of Tessera.
//
//   TESSERA_CHECK(saved == wanted, ErrorKind::kShape, "[checkpoint] {}: saved {}, wanted {}", name, saved, wanted);
//   raise(ErrorKind::kConfig, "[train] unknown key '{}'. Did you mean '{}'?", key, nearest);
//
// A message says: the operation, the object, the found and the expected value, the place, and what to do.
// Errors are thrown as exceptions; every kind maps to one exit code of the program. Thread-safe.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

enum class ErrorKind {
  kConfig,    // the user's settings are invalid: flags, recipe, config.json values
  kIo,        // the operating system refused: missing file, full disk, no permission
  kFormat,    // the contents of a file or a message are invalid
  kShape,     // tensors, meshes or placements do not fit together
  kComm,      // a collective, a rendezvous or a peer failed, or timed out
  kMemory,    // out of memory
  kInternal,  // a defect of Tessera
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }
  // The exit code of a program that ends with this error: 2 usage or config, 3 data or format,
  // 4 communication or timeout, 5 out of memory, 1 anything else.
  int exit_code() const noexcept;

 private:
  ErrorKind kind_;
};

// The name of a kind in logs and JSON: "config", "io", ...
const char* to_string(ErrorKind kind) noexcept;

// Exit code for any exception: Error's own, 5 for memory exhaustion (std::bad_alloc and libtorch's
// allocator failures), 1 for everything else.
int exit_code_for(const std::exception& error) noexcept;

// The first line of the exception's message: without the backtrace that libtorch appends to a message.
std::string first_line(const std::exception& error);
std::string first_line(std::string_view text);

// Converts any exception to an Error. An Error is returned unchanged. Another exception becomes an Error with the first
// line of its message: kMemory where memory was exhausted, else kInternal.
Error as_error(const std::exception& error);

template <class... Args>
[[noreturn]] void raise(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(kind, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tessera

#define TESSERA_CHECK(condition, kind, ...) \
  do {                                      \
    if (!(condition)) [[unlikely]] {        \
      ::tessera::raise(kind, __VA_ARGS__);  \
    }                                       \
  } while (false)
