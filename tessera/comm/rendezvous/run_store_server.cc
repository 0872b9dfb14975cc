#include "tessera/comm/rendezvous/run_store_server.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/rendezvous/run_store_protocol.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kHelloPatience{10'000};  // time limit for a connection to send its hello
constexpr milliseconds kSweep{1000};            // interval between checks of that limit
constexpr size_t kMaxUnauthenticated = 16'384;  // connections without an accepted hello
// Limit in bytes of the incomplete hellos that are buffered for all connections together. A complete hello is answered
// at once and not counted.
constexpr size_t kMaxUnauthenticatedBytes = size_t{16} << 20;
constexpr size_t kAtOnce = size_t{1} << 20;  // bytes read from a connection before its frames are parsed
constexpr size_t kMaxWarnings = 20;

// Compares in a time that does not depend on the position of the first difference, so that the time reveals nothing
// about the secret.
bool same_secret(std::string_view one, std::string_view other) {
  unsigned char difference = one.size() != other.size();
  for (size_t i = 0; i < one.size(); ++i) {
    difference |= static_cast<unsigned char>(one[i] ^ (other.empty() ? '\1' : other[i % other.size()]));
  }
  return difference == 0;
}

}  // namespace

// The server's thread and state. A connection is a ClientConnection; it is also in `unauthenticated_` until its hello
// was accepted. Only the thread changes the state, under `mutex_`, which statistics() takes from other threads.
//
// A kGet or kWait that cannot be answered leaves its keys in `client.awaits`, and the client's descriptor in
// `waiting_[key]` for each of them. Invariant: a descriptor is in `waiting_[key]` only if the client still exists and
// `key` is one of its awaited keys; drop() and stop_waiting() remove it. So store() finds the clients that wait for a
// new key without a search over all connections.
class RunStoreServer::ServerLoop {
 public:
  ServerLoop(UniqueFd listener, RunIdentity identity)
      : identity_(std::move(identity)),
        listener_(std::move(listener)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        poll_(::epoll_create1(EPOLL_CLOEXEC)) {
    ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
    TESSERA_CHECK(wake_.open() && poll_.open() && register_with_epoll(wake_.get(), EPOLLIN, EPOLL_CTL_ADD) &&
                      register_with_epoll(listener_.get(), EPOLLIN, EPOLL_CTL_ADD),
                  ErrorKind::kIo, "[comm.store] eventfd and epoll: {}", std::strerror(errno));
    thread_ = std::thread([this] { run(); });
  }
  ~ServerLoop() {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
    thread_.join();
  }

  RunStoreStatistics statistics() const {
    const std::lock_guard lock(mutex_);
    RunStoreStatistics statistics = statistics_;
    statistics.unauthenticated_bytes = static_cast<int64_t>(unauthenticated_bytes_);
    statistics.keys = static_cast<int64_t>(values_.size());
    for (const auto& [key, value] : values_) statistics.bytes += static_cast<int64_t>(key.size() + value.size());
    return statistics;
  }

 private:
  struct ClientConnection {
    UniqueFd socket;
    std::string in{}, out{};
    size_t unauthenticated_bytes = 0;   // bytes of `in` that are counted in ServerLoop::unauthenticated_bytes_
    bool known = false;                 // the hello was accepted
    bool waits_for_writable = false;    // `out` is not empty: epoll reports when the socket is writable
    bool leaves = false;                // close the connection once `out` is sent
    Clock::time_point since{};          // time of accept
    std::vector<std::string> awaits{};  // keys of the kGet or kWait under way
    bool is_get = false;                // that request is a kGet
  };

  bool register_with_epoll(int descriptor, uint32_t events, int operation) const {
    epoll_event event{.events = events, .data = {.fd = descriptor}};
    return ::epoll_ctl(poll_.get(), operation, descriptor, &event) == 0;
  }

  // The loop of the server's thread. It holds `mutex_` while it handles the events of one epoll_wait(); no handler
  // blocks.
  void run() {
    auto next_look = Clock::now() + kSweep;
    for (;;) {
      epoll_event events[256];
      const int count = ::epoll_wait(poll_.get(), events, 256, static_cast<int>(kSweep.count()));
      const std::lock_guard lock(mutex_);
      for (int i = 0; i < count; ++i) {
        const int descriptor = events[i].data.fd;
        if (descriptor == wake_.get()) return;
        if (descriptor == listener_.get()) {
          accept_connections();
        } else {
          serve(descriptor, events[i].events);
        }
      }
      if (Clock::now() < next_look) continue;
      next_look = Clock::now() + kSweep;
      close_silent_connections();
      if (!listens_) listens_ = register_with_epoll(listener_.get(), EPOLLIN, EPOLL_CTL_ADD);
    }
  }

  void accept_connections() {
    for (int i = 0; i < 256; ++i) {
      UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.open()) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
          close_silent_connections(/*all=*/true);
          // No descriptor is left for a connection. The connections in the backlog keep the listener readable, so every
          // epoll_wait() would return at once. Therefore the listener is removed from epoll, until run() next calls
          // close_silent_connections() and adds it again (about every kSweep).
          listens_ = ::epoll_ctl(poll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr) != 0;
        }
        return;
      }
      const int yes = 1, descriptor = socket.get();
      ::setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
      if (unauthenticated_.size() >= kMaxUnauthenticated || !register_with_epoll(descriptor, EPOLLIN, EPOLL_CTL_ADD)) {
        continue;
      }
      connections_[descriptor] = {.socket = std::move(socket), .since = Clock::now()};
      unauthenticated_.insert(descriptor);
    }
  }

  void close_silent_connections(bool all = false) {
    std::vector<int> silent;
    for (const int descriptor : unauthenticated_) {
      if (all || Clock::now() - connections_.at(descriptor).since > kHelloPatience) silent.push_back(descriptor);
    }
    for (const int descriptor : silent) drop(descriptor);
  }

  void drop(int descriptor) {
    const auto found = connections_.find(descriptor);
    if (found == connections_.end()) return;
    stop_waiting(descriptor, found->second);
    count_unauthenticated(found->second, 0);
    statistics_.connections -= found->second.known ? 1 : 0;
    unauthenticated_.erase(descriptor);
    connections_.erase(found);
  }

  // Handles the events of a connection. At most `at_once` bytes are read before frames are parsed, so that a client
  // cannot make the buffer grow much beyond one frame; level-triggered epoll reports the rest in the next round.
  void serve(int descriptor, uint32_t events) {
    const auto found = connections_.find(descriptor);
    if (found == connections_.end()) return;
    ClientConnection& client = found->second;
    try {
      if ((events & EPOLLOUT) && !flush(client)) return drop(descriptor);
      if (!(events & ~static_cast<uint32_t>(EPOLLOUT))) return;
      const size_t at_once = client.known ? kAtOnce : kMaxStoreHello;
      char chunk[16384];
      ssize_t got = 0;
      size_t taken = 0;
      while ((got = ::recv(descriptor, chunk, sizeof chunk, 0)) > 0) {
        client.in.append(chunk, static_cast<size_t>(got));
        taken += static_cast<size_t>(got);
        if (got < static_cast<ssize_t>(sizeof chunk) || taken >= at_once) break;
      }
      const bool open = got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
      if (!open || !handle_frames(descriptor, client)) return drop(descriptor);
      count_unauthenticated(client, client.known ? 0 : client.in.size());
      if (unauthenticated_bytes_ > kMaxUnauthenticatedBytes && !client.known) drop(descriptor);
    } catch (const std::exception&) {  // a malformed frame, or no memory for the frame
      drop(descriptor);
    }
  }

  void count_unauthenticated(ClientConnection& client, size_t bytes) {
    unauthenticated_bytes_ = unauthenticated_bytes_ - client.unauthenticated_bytes + bytes;
    client.unauthenticated_bytes = bytes;
  }

  // Handles all complete frames in `client.in`. Returns false when the connection must be closed.
  bool handle_frames(int descriptor, ClientConnection& client) {
    size_t used = 0;
    while (client.in.size() - used >= sizeof(uint32_t) && !client.leaves) {
      uint32_t length = 0;
      std::memcpy(&length, client.in.data() + used, sizeof length);
      if (length == 0 || length > (client.known ? kMaxStoreFrame : kMaxStoreHello)) return false;
      if (client.in.size() - used - sizeof length < length) break;
      const FrameReader frame(std::string_view(client.in).substr(used + sizeof length, length));
      used += sizeof length + length;
      if (client.known) {
        ++statistics_.requests;
        answer(descriptor, client, frame);
      } else {
        handle_hello(descriptor, client, frame);
      }
    }
    client.in.erase(0, client.leaves ? client.in.npos : used);
    return flush(client);
  }

  // Handles the first frame of a connection. The token is compared before the run, so that a client without the token
  // cannot find out the name of the run.
  void handle_hello(int descriptor, ClientConnection& client, FrameReader frame) {
    if (static_cast<RunStoreRequest>(frame.kind()) != RunStoreRequest::kHello || frame.take_number() != kStoreMagic) {
      client.leaves = true;
      return;
    }
    const std::string_view token = frame.take(), run = frame.take(), who = frame.take();
    auto found = RunStoreAnswer::kOk;
    Json name = Json::object();
    if (!same_secret(token, identity_.token)) {
      found = RunStoreAnswer::kWrongToken;
    } else {
      if (!run.empty() && !identity_.run.empty() && run != identity_.run) found = RunStoreAnswer::kWrongRun;
      name = {{"run", identity_.run}, {"who", identity_.who}};
    }
    client.out += FrameWriter(found).put(dump_json(name)).finish();
    if (found == RunStoreAnswer::kOk) {
      client.known = true;
      ++statistics_.connections;
      unauthenticated_.erase(descriptor);
      return;
    }
    client.leaves = true;
    if (warnings_++ >= kMaxWarnings) return;
    log_warning("[comm.rendezvous] refused {}: {}", quote(who, 80),
                found == RunStoreAnswer::kWrongToken
                    ? "it has another TESSERA_TOKEN than this run"
                    : fmt::format("it is of run {}, this is '{}'", quote(run, 80), identity_.run));
  }

  void reply(ClientConnection& client, FrameWriter writer) { client.out += writer.finish(); }

  void answer(int descriptor, ClientConnection& client, FrameReader frame) {
    switch (static_cast<RunStoreRequest>(frame.kind())) {
      case RunStoreRequest::kSet: {
        const std::string key(frame.take());
        store(key, std::string(frame.take()));
        return reply(client, FrameWriter(RunStoreAnswer::kOk));
      }
      case RunStoreRequest::kCompareSet: {
        // Behaves as c10d's compareSet(): a missing key is set only if `expected` is empty. The answer is the key's
        // value after the request, or `expected` if the key is still missing.
        const std::string key(frame.take());
        const std::string_view expected = frame.take(), desired = frame.take();
        const auto found = values_.find(key);
        const bool takes = found == values_.end() ? expected.empty() : found->second == expected;
        std::string now(takes || found == values_.end() ? (takes ? desired : expected) : found->second);
        if (takes) store(key, std::string(desired));
        return reply(client, FrameWriter(RunStoreAnswer::kOk).put(now));
      }
      case RunStoreRequest::kAdd: {  // as c10d: values that are added to are kept as decimal text
        const std::string key(frame.take());
        int64_t sum = frame.take_number();
        if (const auto found = values_.find(key); found != values_.end()) {
          const int64_t held = std::atoll(found->second.c_str());
          sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(held));  // may wrap around
        }
        store(key, std::to_string(sum));
        return reply(client, FrameWriter(RunStoreAnswer::kOk).put(sum));
      }
      case RunStoreRequest::kAppend: {
        const std::string key(frame.take());
        const auto found = values_.find(key);
        store(key, (found == values_.end() ? "" : found->second) + std::string(frame.take()));
        return reply(client, FrameWriter(RunStoreAnswer::kOk));
      }
      case RunStoreRequest::kDelete:
        return reply(client,
                     FrameWriter(values_.erase(std::string(frame.take())) ? RunStoreAnswer::kOk : RunStoreAnswer::kNo));
      case RunStoreRequest::kCheck: {
        bool all = true;
        while (!frame.at_end()) all = values_.contains(std::string(frame.take())) && all;
        return reply(client, FrameWriter(all ? RunStoreAnswer::kOk : RunStoreAnswer::kNo));
      }
      case RunStoreRequest::kGet:
      case RunStoreRequest::kWait:
        stop_waiting(descriptor, client);
        client.is_get = static_cast<RunStoreRequest>(frame.kind()) == RunStoreRequest::kGet;
        while (!frame.at_end()) client.awaits.emplace_back(frame.take());
        if (try_answer(client)) return client.awaits.clear();
        for (const std::string& key : client.awaits) waiting_[key].insert(descriptor);
        return;
      case RunStoreRequest::kCancel:
        if (client.awaits.empty()) return;  // the request has been answered already
        stop_waiting(descriptor, client);
        return reply(client, FrameWriter(RunStoreAnswer::kNo));
      case RunStoreRequest::kCount:
        return reply(client, FrameWriter(RunStoreAnswer::kOk).put(static_cast<int64_t>(values_.size())));
      case RunStoreRequest::kHello:
        break;
    }
    raise(ErrorKind::kComm, "[comm.store] unknown request number {}", frame.kind());
  }

  // Answers the client's kGet or kWait if all its keys are set; returns whether it did.
  bool try_answer(ClientConnection& client) {
    FrameWriter writer(RunStoreAnswer::kOk);
    for (const std::string& key : client.awaits) {
      const auto found = values_.find(key);
      if (found == values_.end()) return false;
      if (client.is_get) writer.put(found->second);
    }
    reply(client, std::move(writer));
    return true;
  }

  void stop_waiting(int descriptor, ClientConnection& client) {
    for (const std::string& key : client.awaits) {
      const auto found = waiting_.find(key);
      if (found == waiting_.end()) continue;
      found->second.erase(descriptor);
      if (found->second.empty()) waiting_.erase(found);
    }
    client.awaits.clear();
  }

  // Sets a key and answers the clients that waited for it. An error or a broken connection of a waiting client must not
  // reach the client that set the key: the connection of the waiting client is shut down here, and serve() drops this
  // connection when it reads the end of its stream.
  void store(const std::string& key, std::string value) {
    values_[key] = std::move(value);
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) return;
    const std::set<int> waiting = std::move(found->second);
    waiting_.erase(found);
    for (const int descriptor : waiting) {
      ClientConnection& client = connections_.at(descriptor);
      try {
        if (!try_answer(client)) continue;  // other keys of the client are missing
      } catch (const Error&) {              // the answer would be longer than a frame may be
        ::shutdown(descriptor, SHUT_RDWR);
      }
      stop_waiting(descriptor, client);
      if (!flush(client)) ::shutdown(descriptor, SHUT_RDWR);
    }
  }

  // Sends the bytes of `client.out` that the socket accepts now. Returns false when the connection has ended, or when
  // all bytes are sent and `client.leaves` is set.
  bool flush(ClientConnection& client) const {
    size_t sent = 0;
    bool open = true;
    while (sent < client.out.size()) {
      const ssize_t count =
          ::send(client.socket.get(), client.out.data() + sent, client.out.size() - sent, MSG_NOSIGNAL);
      if (count > 0) sent += static_cast<size_t>(count);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) {
        open = errno == EAGAIN;
        break;
      }
    }
    client.out.erase(0, sent);
    if (client.out.empty() && client.out.capacity() > 65536) client.out.shrink_to_fit();
    if (client.waits_for_writable == client.out.empty()) {
      client.waits_for_writable = !client.out.empty();
      register_with_epoll(client.socket.get(),
                          EPOLLIN | (client.waits_for_writable ? static_cast<uint32_t>(EPOLLOUT) : 0U), EPOLL_CTL_MOD);
    }
    return open && !(client.leaves && client.out.empty());
  }

  const RunIdentity identity_;
  UniqueFd listener_, wake_, poll_;
  mutable std::mutex mutex_;
  std::unordered_map<int, ClientConnection> connections_;   // by descriptor
  std::set<int> unauthenticated_;                           // descriptors of clients without an accepted hello
  std::unordered_map<std::string, std::string> values_;     // the store
  std::unordered_map<std::string, std::set<int>> waiting_;  // by key: descriptors of clients that wait for it
  RunStoreStatistics statistics_;
  size_t warnings_ = 0, unauthenticated_bytes_ = 0;
  bool listens_ = true;  // the listener is in epoll
  std::thread thread_;
};

RunStoreServer::RunStoreServer(UniqueFd listener, RunIdentity identity)
    : loop_(std::make_unique<ServerLoop>(std::move(listener), std::move(identity))) {}
RunStoreServer::~RunStoreServer() = default;
RunStoreStatistics RunStoreServer::statistics() const { return loop_->statistics(); }

}  // namespace tessera::comm
