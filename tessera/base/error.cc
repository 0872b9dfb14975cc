#include "tessera/base/error.h"

#include <iterator>
#include <new>

#include "tessera/base/enum_name.h"

namespace tessera {

int Error::exit_code() const noexcept {
  static constexpr int kExitCodes[] = {2, 3, 3, 3, 4, 5, 1};  // in the order of ErrorKind
  const auto place = static_cast<size_t>(kind_);
  return place < std::size(kExitCodes) ? kExitCodes[place] : 1;
}

const char* to_string(ErrorKind kind) noexcept {
  return enum_name(kind, {"config", "io", "format", "shape", "comm", "memory", "internal"}, "internal");
}

int exit_code_for(const std::exception& error) noexcept {
  if (const auto* ours = dynamic_cast<const Error*>(&error)) return ours->exit_code();
  if (dynamic_cast<const std::bad_alloc*>(&error)) return 5;
  // libtorch's allocators report exhausted memory as c10::Error. Only the message distinguishes this error from others.
  const std::string_view message = error.what();
  if (message.find("can't allocate memory") != message.npos || message.find("out of memory") != message.npos) return 5;
  return 1;
}

std::string first_line(const std::exception& error) { return first_line(std::string_view(error.what())); }

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

Error as_error(const std::exception& error) {
  if (const auto* ours = dynamic_cast<const Error*>(&error)) return *ours;
  return {exit_code_for(error) == 5 ? ErrorKind::kMemory : ErrorKind::kInternal, first_line(error)};
}

}  // namespace tessera
