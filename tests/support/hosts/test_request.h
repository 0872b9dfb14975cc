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

// With the sender's standard streams. False when the other side is gone.
bool send_request(int socket, const Request& request);
// Puts the streams' kStreams descriptors into `streams`. Empty for what is no request; descriptors that came are there
// all the same.
std::optional<Request> receive_request(int socket, std::vector<int>& streams);

// What is said in answer: false when the other side is gone, and fewer bytes than asked for.
bool send_bytes(int socket, const std::string& bytes);
std::string receive_bytes(int socket, size_t count);

}  // namespace tessera::testing
