// The request that a test's client sends to the host of its program (test_host.h), and its transport.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

inline constexpr int kStreams = 3;  // standard input, output and error

struct Request {
  std::string folder;  // working directory
  std::vector<std::string> words, environment;

  std::string text() const;  // The text form: the number of words, then NUL-terminated strings.
  // Empty if the text is not a request.
  static std::optional<Request> parse(const std::string& text);
};

// Sends the request with the sender's standard streams. Returns false if the other side has closed.
bool send_request(int socket, const Request& request);
// Adds the kStreams descriptors of the streams to `streams`. The result is empty if the bytes are not a request;
// descriptors that arrived are in `streams` even then.
std::optional<Request> receive_request(int socket, std::vector<int>& streams);

// Bytes of the answer. send_bytes() returns false if the other side has closed; receive_bytes() returns fewer bytes
// then.
bool send_bytes(int socket, const std::string& bytes);
std::string receive_bytes(int socket, size_t count);

}  // namespace tessera::testing
