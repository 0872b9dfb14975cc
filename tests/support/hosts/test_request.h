// What a test's client sends to the host of its program (test_host.h), and how.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

inline constexpr int kStreams = 3;  // standard input, output and error

struct Request {
  std::string folder;  // the working directory
  std::vector<std::string> words, environment;

  std::string text() const;  // NUL-terminated strings, behind the number of words
  // Empty for what is none.
  static std::optional<Request> parse(const std::string& text);
};

// False when the other side is gone. `streams`: kStreams descriptors, or none (nullptr).
bool send_all(int socket, const std::string& bytes, const int* streams = nullptr);
// As many bytes as asked for, fewer when the other side is gone, and the descriptors that came with them.
std::string receive(int socket, size_t bytes, std::vector<int>* streams = nullptr);

}  // namespace tessera::testing
