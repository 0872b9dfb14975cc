// What libtorch says of an error, without the backtrace that it adds. Internal to comm.
//
//   catch (const std::exception& error) { raise(ErrorKind::kComm, "[comm.store] {}", first_line(error)); }
#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace tessera::comm {

inline std::string first_line(const std::exception& error) {
  const auto* own = dynamic_cast<const c10::Error*>(&error);
  const std::string text = own ? own->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace tessera::comm
