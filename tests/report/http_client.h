// A plain HTTP client for tests of pages, and ports that are free.
//
//   const uint16_t port = take_port().second;
//   get(port, "/data.json");                       // status line, headers and content; "refused" when nobody listens
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <utility>

#include "tessera/base/unique_fd.h"

namespace tessera::report {

inline sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// A port that was free a moment ago, and the socket that holds it.
inline std::pair<UniqueFd, uint16_t> take_port() {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  auto address = loopback(0);
  socklen_t size = sizeof(address);
  EXPECT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  return {std::move(socket), ntohs(address.sin_port)};
}

inline std::string ask(uint16_t port, const std::string& request) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto address = loopback(port);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return "refused";
  EXPECT_EQ(::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[65536];
  for (ssize_t count; (count = ::recv(socket.get(), buffer, sizeof(buffer), 0)) > 0;) {
    answer.append(buffer, static_cast<size_t>(count));
  }
  return answer;
}

inline std::string get(uint16_t port, const std::string& url, const std::string& host = "127.0.0.1") {
  return ask(port, "GET " + url + " HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n");
}

}  // namespace tessera::report
