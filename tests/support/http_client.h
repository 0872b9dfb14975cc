// A minimal HTTP client with one request per connection, so that tests can send requests that no library would send.
//
//   const HttpReply reply = http(port, "POST", "/v1/completions", body);
//   get(port, "/data.json");                       // status line, headers and content; "refused" when nobody listens
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "tessera/base/files/unique_fd.h"
#include "tests/support/free_port.h"

namespace tessera::testing {

// An empty descriptor if no server listens.
inline UniqueFd connect_to(int port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto address = loopback(port);
  const timeval patience{60, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) socket.reset();
  return socket;
}

inline bool send_all(int socket, const std::string& text) {
  return ::send(socket, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
}

inline std::string read_all(int socket) {
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::recv(socket, buffer, sizeof buffer, 0)) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  return text;
}

inline std::string ask(int port, const std::string& request) {
  const auto socket = connect_to(port);
  if (socket.get() < 0) return "refused";
  send_all(socket.get(), request);
  return read_all(socket.get());
}

struct HttpReply {
  int status = 0;
  std::string head, body;  // a chunked body is not decoded
};

inline HttpReply parse_reply(const std::string& text) {
  HttpReply reply;
  const auto end = text.find("\r\n\r\n");
  if (end == std::string::npos || !text.starts_with("HTTP/1.1 ")) return reply;
  reply.status = std::stoi(text.substr(9, 3));
  reply.head = text.substr(0, end);
  reply.body = text.substr(end + 4);
  return reply;
}

// `headers` are lines that end with \r
// .
inline HttpReply http(int port, const std::string& method, const std::string& path, const std::string& body = "",
                      const std::string& headers = "Content-Type: application/json\r\n") {
  const auto length = method == "POST" ? "Content-Length: " + std::to_string(body.size()) + "\r\n" : "";
  return parse_reply(ask(port, method + " " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + length +
                                   headers + "\r\n" + body));
}

inline std::string get(int port, const std::string& url, const std::string& host = "127.0.0.1") {
  return ask(port, "GET " + url + " HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n");
}

}  // namespace tessera::testing
