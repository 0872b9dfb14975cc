// Sending and receiving of test requests over a Unix socket, with the descriptors of the standard streams.
#include "tests/support/hosts/test_request.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace tessera::testing {
namespace {

// `streams` has kStreams descriptors, or is nullptr.
bool send_with(int socket, const std::string& bytes, const int* streams) {
  for (size_t sent = 0; sent < bytes.size();) {
    iovec piece{const_cast<char*>(bytes.data()) + sent, bytes.size() - sent};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(kStreams * sizeof(int))> control{};
    if (streams && sent == 0) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(kStreams * sizeof(int));
      std::memcpy(CMSG_DATA(header), streams, kStreams * sizeof(int));
    }
    const ssize_t step = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (step < 0 && errno == EINTR) continue;
    if (step <= 0) return false;
    sent += static_cast<size_t>(step);
  }
  return true;
}

// Returns fewer bytes if the other side has closed. Descriptors that arrive with the bytes are added to `streams`.
std::string receive_with(int socket, size_t bytes, std::vector<int>* streams) {
  std::string all(bytes, '\0');
  size_t got = 0;
  while (got < bytes) {
    iovec piece{all.data() + got, bytes - got};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(kStreams * sizeof(int))> control{};
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t step = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (step < 0 && errno == EINTR) continue;
    if (step <= 0) break;
    got += static_cast<size_t>(step);
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      std::vector<int> came((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
      std::memcpy(came.data(), CMSG_DATA(header), came.size() * sizeof(int));
      for (const int one : came) streams ? streams->push_back(one) : void(::close(one));
    }
  }
  all.resize(got);
  return all;
}

}  // namespace

std::string Request::text() const {
  std::string all = std::to_string(words.size()) + '\0';
  all += folder + '\0';
  for (const auto& word : words) all += word + '\0';
  for (const auto& setting : environment) all += setting + '\0';
  return all;
}

std::optional<Request> Request::parse(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\0', at);
    if (end == text.npos) return std::nullopt;
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  if (parts.size() < 3) return std::nullopt;
  const auto count = static_cast<size_t>(std::atol(parts[0].c_str()));
  if (count == 0 || parts.size() < 2 + count) return std::nullopt;
  const auto words = parts.begin() + 2, settings = words + static_cast<std::ptrdiff_t>(count);
  return Request{.folder = parts[1], .words = {words, settings}, .environment = {settings, parts.end()}};
}

bool send_request(int socket, const Request& request) {
  const std::string text = request.text();
  const size_t size = text.size();
  const int streams[kStreams] = {0, 1, 2};
  return send_with(socket, std::string(reinterpret_cast<const char*>(&size), sizeof size), streams) &&
         send_bytes(socket, text);
}

std::optional<Request> receive_request(int socket, std::vector<int>& streams) {
  constexpr size_t kLargest = size_t{1} << 22;
  size_t size = 0;
  const std::string head = receive_with(socket, sizeof size, &streams);
  if (head.size() != sizeof size || streams.size() != kStreams) return std::nullopt;
  std::memcpy(&size, head.data(), sizeof size);
  if (size > kLargest) return std::nullopt;
  return Request::parse(receive_bytes(socket, size));
}

bool send_bytes(int socket, const std::string& bytes) { return send_with(socket, bytes, nullptr); }
std::string receive_bytes(int socket, size_t count) { return receive_with(socket, count, nullptr); }

}  // namespace tessera::testing
