#include "tessera/comm/rendezvous/run_store.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/text/json.h"
#include "tessera/comm/watch/peer_socket.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRetry{200};
constexpr milliseconds kAnswer{30'000};  // time limit of the store's answer to a request that does not wait for keys

std::string_view view_of(const std::vector<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<uint8_t> bytes_from(std::string_view text) { return {text.begin(), text.end()}; }

[[noreturn]] void raise_gone(const RunStoreAddress& address, const std::string& why) {
  C10_THROW_ERROR(DistNetworkError, fmt::format("[comm.store] lost the connection to rank 0's store at {}:{}: {}",
                                                address.host, address.port, why));
}

std::string keys_shown(const std::vector<std::string>& keys) {
  if (keys.empty()) return "";
  return keys.size() == 1 ? keys[0] : fmt::format("one of {} and {} more", keys[0], keys.size() - 1);
}

}  // namespace

RunStore::RunStore(RunStoreAddress address, RunIdentity identity, milliseconds timeout,
                   std::shared_ptr<RunStoreServer> server)
    : Store(timeout), address_(std::move(address)), identity_(std::move(identity)), server_(std::move(server)) {
  const auto deadline = Clock::now() + timeout;
  std::string reason = "no process answers";
  while (!try_connect(deadline, reason)) {
    if (Clock::now() + kRetry >= deadline) C10_THROW_ERROR(DistNetworkError, reason);
    std::this_thread::sleep_for(kRetry);
  }
}

// Throws RunStoreRefusal when the server refuses this client, since another attempt cannot succeed. Any other failure
// returns false: the server may not be up yet, or the server of a previous run may be ending.
bool RunStore::try_connect(Clock::time_point deadline, std::string& reason) {
  const std::lock_guard lock(mutex_);
  PeerSocket connected = connect_to(address_.host, address_.port, deadline, reason);
  if (!connected.open()) return false;
  socket_ = connected.release();
  in_.clear();
  try {
    send_all(FrameWriter(RunStoreRequest::kHello)
                 .put(int64_t{kStoreMagic})
                 .put(identity_.token)
                 .put(identity_.run)
                 .put(identity_.who)
                 .finish(),
             deadline);
    const auto answer = receive(std::min(deadline, Clock::now() + kAnswer));
    if (!answer) {
      reason = "the process that listens there does not answer";
      return false;
    }
    FrameReader answer_reader(*answer);
    const auto found = static_cast<RunStoreAnswer>(answer_reader.kind());
    if (found == RunStoreAnswer::kOk) return true;
    const Json name = parse_json_object(std::string(answer_reader.take()), "it");
    const JsonReader reader(name, "it");
    throw RunStoreRefusal(found, reader.string("run", ""), reader.string("who", "rank 0"));
  } catch (const RunStoreRefusal&) {
    throw;
  } catch (const std::exception& error) {  // the server has ended, or another program listens there
    reason = first_line(error);
    return false;
  }
}

// A clone has a connection of its own, so that waits in the clone do not block users of the original.
c10::intrusive_ptr<c10d::Store> RunStore::clone() {
  return c10::make_intrusive<RunStore>(address_, identity_, getTimeout(), server_);
}

void RunStore::send_all(std::string_view bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      if (!wait_until_ready(socket_.get(), POLLOUT, deadline)) {
        raise_gone(address_, "the store does not read its requests");
      }
    } else if (errno != EINTR) {
      raise_gone(address_, std::strerror(errno));
    }
  }
}

// Parses frames from `in_`, where received bytes are collected: recv() may return parts of a frame or several frames. A
// length outside the limits means that the peer does not speak this protocol.
std::optional<std::string> RunStore::receive(Clock::time_point deadline) {
  for (;;) {
    uint32_t length = 0;
    if (in_.size() >= sizeof length) {
      std::memcpy(&length, in_.data(), sizeof length);
      if (length == 0 || length > kMaxStoreFrame) {
        raise(ErrorKind::kComm, "the process that listens there is no store of this version");
      }
      if (in_.size() - sizeof length >= length) {
        std::string frame = in_.substr(sizeof length, length);
        in_.erase(0, sizeof length + length);
        return frame;
      }
    }
    if (!wait_until_ready(socket_.get(), POLLIN, deadline)) return std::nullopt;
    char chunk[16384];
    const ssize_t got = ::recv(socket_.get(), chunk, sizeof chunk, MSG_DONTWAIT);
    if (got > 0) {
      in_.append(chunk, static_cast<size_t>(got));
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      raise_gone(address_, got == 0 ? "it has closed the connection" : std::strerror(errno));
    }
  }
}

// If the answer does not come in time, the socket is closed: a late answer would be taken for the answer to the next
// request.
std::string RunStore::ask(std::string frame) {
  const std::lock_guard lock(mutex_);
  const auto deadline = Clock::now() + std::max(kAnswer, getTimeout());
  if (!socket_.open()) raise_gone(address_, "it did not answer before");
  send_all(frame, deadline);
  auto answer = receive(deadline);
  if (!answer) {
    socket_.reset();
    raise_gone(address_, "the store does not answer");
  }
  return std::move(*answer);
}

// After the timeout a kCancel is sent, and the server then answers the request exactly once: with kNo, or with kOk if
// the keys were set meanwhile. So requests and answers stay in step and the connection can be used again.
std::string RunStore::await(RunStoreRequest op, const std::vector<std::string>& keys, milliseconds timeout) {
  FrameWriter request(op);
  for (const std::string& key : keys) request.put(key);
  const std::lock_guard lock(mutex_);
  const auto deadline = Clock::now() + std::max(timeout, milliseconds(0));
  if (!socket_.open()) raise_gone(address_, "it did not answer before");
  send_all(request.finish(), deadline + kAnswer);
  auto answer = receive(deadline);
  if (!answer) {
    send_all(FrameWriter(RunStoreRequest::kCancel).finish(), deadline + kAnswer);
    answer = receive(deadline + kAnswer);
    if (!answer) {
      socket_.reset();
      raise_gone(address_, "it does not answer");
    }
  }
  if (FrameReader(*answer).kind() == static_cast<uint8_t>(RunStoreAnswer::kOk)) return std::move(*answer);
  C10_THROW_ERROR(DistStoreError,
                  fmt::format("[comm.store] no value for {} within {} ms", keys_shown(keys), timeout.count()));
}

void RunStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  ask(FrameWriter(RunStoreRequest::kSet).put(key).put(view_of(value)).finish());
}

std::vector<uint8_t> RunStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                          const std::vector<uint8_t>& desired) {
  const std::string answer =
      ask(FrameWriter(RunStoreRequest::kCompareSet).put(key).put(view_of(expected)).put(view_of(desired)).finish());
  return bytes_from(FrameReader(answer).take());
}

std::vector<uint8_t> RunStore::get(const std::string& key) {
  const std::string answer = await(RunStoreRequest::kGet, {key}, getTimeout());
  return bytes_from(FrameReader(answer).take());
}

int64_t RunStore::add(const std::string& key, int64_t value) {
  const std::string answer = ask(FrameWriter(RunStoreRequest::kAdd).put(key).put(value).finish());
  return FrameReader(answer).take_number();
}

bool RunStore::deleteKey(const std::string& key) {
  return FrameReader(ask(FrameWriter(RunStoreRequest::kDelete).put(key).finish())).kind() == 0;
}

bool RunStore::check(const std::vector<std::string>& keys) {
  FrameWriter request(RunStoreRequest::kCheck);
  for (const std::string& key : keys) request.put(key);
  return FrameReader(ask(request.finish())).kind() == 0;
}

int64_t RunStore::getNumKeys() {
  const std::string answer = ask(FrameWriter(RunStoreRequest::kCount).finish());
  return FrameReader(answer).take_number();
}

void RunStore::wait(const std::vector<std::string>& keys) { wait(keys, getTimeout()); }

void RunStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  if (!keys.empty()) await(RunStoreRequest::kWait, keys, timeout);
}

void RunStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  ask(FrameWriter(RunStoreRequest::kAppend).put(key).put(view_of(value)).finish());
}

std::vector<std::vector<uint8_t>> RunStore::multiGet(const std::vector<std::string>& keys) {
  std::vector<std::vector<uint8_t>> values;
  if (keys.empty()) return values;
  const std::string answer = await(RunStoreRequest::kGet, keys, getTimeout());
  FrameReader reader(answer);
  while (!reader.at_end()) values.push_back(bytes_from(reader.take()));
  return values;
}

void RunStore::multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) {
  TESSERA_CHECK(keys.size() == values.size(), ErrorKind::kInternal, "[comm.store] {} keys and {} values", keys.size(),
                values.size());
  for (size_t i = 0; i < keys.size(); ++i) set(keys[i], values[i]);
}

}  // namespace tessera::comm
