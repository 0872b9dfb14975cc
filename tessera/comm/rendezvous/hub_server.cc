#include "tessera/comm/rendezvous/hub_server.h"

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
#include "tessera/comm/rendezvous/hub_protocol.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kHelloPatience{10'000};  // time limit for a connection to send its hello
constexpr milliseconds kSweep{1000};            // interval between checks of that limit
constexpr size_t kMostStrangers = 16'384;       // connections without an accepted hello
// Limit of the buffered incomplete hellos of all such connections together. A complete hello is answered at once.
constexpr size_t kMostUnknownBytes = size_t{16} << 20;
constexpr size_t kAtOnce = size_t{1} << 20;  // bytes read from a connection before its frames are parsed
constexpr size_t kMostWarnings = 20;

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

// The server's thread and state. A connection is a Guest; it is also in `strangers_` until its hello was accepted. Only
// the thread changes the state, under `mutex_`, which figures() takes from other threads.
//
// A kGet or kWait that cannot be answered leaves its keys in `guest.awaits`, and the guest's descriptor in
// `waiting_[key]` for each of them. Invariant: a descriptor is in `waiting_[key]` only if the guest still exists and
// `key` is one of its awaited keys; drop() and stop_waiting() remove it. So store() finds all guests that a new key may
// serve without a search over connections.
class HubServer::Loop {
 public:
  Loop(UniqueFd listener, HubIdentity identity)
      : identity_(std::move(identity)),
        listener_(std::move(listener)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        poll_(::epoll_create1(EPOLL_CLOEXEC)) {
    ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
    TESSERA_CHECK(wake_.open() && poll_.open() && attend(wake_.get(), EPOLLIN, EPOLL_CTL_ADD) &&
                      attend(listener_.get(), EPOLLIN, EPOLL_CTL_ADD),
                  ErrorKind::kIo, "[comm.store] eventfd and epoll: {}", std::strerror(errno));
    thread_ = std::thread([this] { run(); });
  }
  ~Loop() {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
    thread_.join();
  }

  HubFigures figures() const {
    const std::lock_guard lock(mutex_);
    HubFigures figures = figures_;
    figures.unknown_bytes = static_cast<int64_t>(unknown_bytes_);
    figures.keys = static_cast<int64_t>(values_.size());
    for (const auto& [key, value] : values_) figures.bytes += static_cast<int64_t>(key.size() + value.size());
    return figures;
  }

 private:
  struct Guest {
    UniqueFd socket;
    std::string in{}, out{};
    size_t unknown_bytes = 0;           // bytes of `in` that are counted in Loop::unknown_bytes_
    bool known = false;                 // the hello was accepted
    bool awaits_room = false;           // `out` is not empty: epoll reports when the socket is writable
    bool leaves = false;                // close the connection once `out` is sent
    Clock::time_point since{};          // time of accept
    std::vector<std::string> awaits{};  // keys of the kGet or kWait under way
    bool wants_values = false;          // that request is a kGet
  };

  bool attend(int descriptor, uint32_t events, int how) const {
    epoll_event event{.events = events, .data = {.fd = descriptor}};
    return ::epoll_ctl(poll_.get(), how, descriptor, &event) == 0;
  }

  // The loop. The lock is held while the events of one epoll_wait() are handled; no handler blocks.
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
          let_in();
        } else {
          serve(descriptor, events[i].events);
        }
      }
      if (Clock::now() < next_look) continue;
      next_look = Clock::now() + kSweep;
      send_away_the_silent();
      if (!listens_) listens_ = attend(listener_.get(), EPOLLIN, EPOLL_CTL_ADD);
    }
  }

  void let_in() {
    for (int i = 0; i < 256; ++i) {
      UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.open()) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
          send_away_the_silent(/*all=*/true);
          // The connections in the backlog would keep the listener readable and epoll_wait() would return without end,
          // so the listener is removed from epoll until the next sweep.
          listens_ = ::epoll_ctl(poll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr) != 0;
        }
        return;
      }
      const int yes = 1, descriptor = socket.get();
      ::setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
      if (strangers_.size() >= kMostStrangers || !attend(descriptor, EPOLLIN, EPOLL_CTL_ADD)) continue;
      guests_[descriptor] = {.socket = std::move(socket), .since = Clock::now()};
      strangers_.insert(descriptor);
    }
  }

  void send_away_the_silent(bool all = false) {
    std::vector<int> silent;
    for (const int descriptor : strangers_) {
      if (all || Clock::now() - guests_.at(descriptor).since > kHelloPatience) silent.push_back(descriptor);
    }
    for (const int descriptor : silent) drop(descriptor);
  }

  void drop(int descriptor) {
    const auto found = guests_.find(descriptor);
    if (found == guests_.end()) return;
    stop_waiting(descriptor, found->second);
    count_unknown(found->second, 0);
    figures_.connections -= found->second.known ? 1 : 0;
    strangers_.erase(descriptor);
    guests_.erase(found);
  }

  // Handles the events of a connection. At most `at_once` bytes are read before frames are parsed, so that a client
  // cannot make the buffer grow much beyond one frame; level-triggered epoll reports the rest in the next round.
  void serve(int descriptor, uint32_t events) {
    const auto found = guests_.find(descriptor);
    if (found == guests_.end()) return;
    Guest& guest = found->second;
    try {
      if ((events & EPOLLOUT) && !flush(guest)) return drop(descriptor);
      if (!(events & ~static_cast<uint32_t>(EPOLLOUT))) return;
      const size_t at_once = guest.known ? kAtOnce : kMaxHubHello;
      char chunk[16384];
      ssize_t got = 0;
      size_t taken = 0;
      while ((got = ::recv(descriptor, chunk, sizeof chunk, 0)) > 0) {
        guest.in.append(chunk, static_cast<size_t>(got));
        taken += static_cast<size_t>(got);
        if (got < static_cast<ssize_t>(sizeof chunk) || taken >= at_once) break;
      }
      const bool open = got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
      if (!open || !take_frames(descriptor, guest)) return drop(descriptor);
      count_unknown(guest, guest.known ? 0 : guest.in.size());
      if (unknown_bytes_ > kMostUnknownBytes && !guest.known) drop(descriptor);
    } catch (const std::exception&) {  // a malformed frame, or no memory for the frame
      drop(descriptor);
    }
  }

  void count_unknown(Guest& guest, size_t bytes) {
    unknown_bytes_ = unknown_bytes_ - guest.unknown_bytes + bytes;
    guest.unknown_bytes = bytes;
  }

  // Handles all complete frames in `guest.in`. Returns false when the connection must be closed.
  bool take_frames(int descriptor, Guest& guest) {
    size_t used = 0;
    while (guest.in.size() - used >= sizeof(uint32_t) && !guest.leaves) {
      uint32_t length = 0;
      std::memcpy(&length, guest.in.data() + used, sizeof length);
      if (length == 0 || length > (guest.known ? kMaxHubFrame : kMaxHubHello)) return false;
      if (guest.in.size() - used - sizeof length < length) break;
      const FrameReader frame(std::string_view(guest.in).substr(used + sizeof length, length));
      used += sizeof length + length;
      if (guest.known) {
        ++figures_.requests;
        answer(descriptor, guest, frame);
      } else {
        greet(descriptor, guest, frame);
      }
    }
    guest.in.erase(0, guest.leaves ? guest.in.npos : used);
    return flush(guest);
  }

  // Handles the first frame of a connection. The token is compared before the run, so that a client without the token
  // cannot find out the name of the run.
  void greet(int descriptor, Guest& guest, FrameReader frame) {
    if (static_cast<HubOp>(frame.kind()) != HubOp::kHello || frame.take_number() != kHubMagic) {
      guest.leaves = true;
      return;
    }
    const std::string_view token = frame.take(), run = frame.take(), who = frame.take();
    auto found = HubAnswer::kOk;
    Json name = Json::object();
    if (!same_secret(token, identity_.token)) {
      found = HubAnswer::kWrongToken;
    } else {
      if (!run.empty() && !identity_.run.empty() && run != identity_.run) found = HubAnswer::kWrongRun;
      name = {{"run", identity_.run}, {"who", identity_.who}};
    }
    guest.out += FrameWriter(found).put(dump_json(name)).finish();
    if (found == HubAnswer::kOk) {
      guest.known = true;
      ++figures_.connections;
      strangers_.erase(descriptor);
      return;
    }
    guest.leaves = true;
    if (warnings_++ >= kMostWarnings) return;
    log_warning("[comm.rendezvous] refused {}: {}", quote(who, 80),
                found == HubAnswer::kWrongToken
                    ? "it has another TESSERA_TOKEN than this run"
                    : fmt::format("it is of run {}, this is '{}'", quote(run, 80), identity_.run));
  }

  void reply(Guest& guest, FrameWriter writer) { guest.out += writer.finish(); }

  void answer(int descriptor, Guest& guest, FrameReader frame) {
    switch (static_cast<HubOp>(frame.kind())) {
      case HubOp::kSet: {
        const std::string key(frame.take());
        store(key, std::string(frame.take()));
        return reply(guest, FrameWriter(HubAnswer::kOk));
      }
      case HubOp::kCompareSet: {  // as c10d: a missing key is set if `expected` is empty; answers the value afterwards
        const std::string key(frame.take());
        const std::string_view expected = frame.take(), desired = frame.take();
        const auto found = values_.find(key);
        const bool takes = found == values_.end() ? expected.empty() : found->second == expected;
        std::string now(takes || found == values_.end() ? (takes ? desired : expected) : found->second);
        if (takes) store(key, std::string(desired));
        return reply(guest, FrameWriter(HubAnswer::kOk).put(now));
      }
      case HubOp::kAdd: {  // as c10d: values that are added to are kept as decimal text
        const std::string key(frame.take());
        int64_t sum = frame.take_number();
        if (const auto found = values_.find(key); found != values_.end()) {
          const int64_t held = std::atoll(found->second.c_str());
          sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(held));  // may wrap around
        }
        store(key, std::to_string(sum));
        return reply(guest, FrameWriter(HubAnswer::kOk).put(sum));
      }
      case HubOp::kAppend: {
        const std::string key(frame.take());
        const auto found = values_.find(key);
        store(key, (found == values_.end() ? "" : found->second) + std::string(frame.take()));
        return reply(guest, FrameWriter(HubAnswer::kOk));
      }
      case HubOp::kDelete:
        return reply(guest, FrameWriter(values_.erase(std::string(frame.take())) ? HubAnswer::kOk : HubAnswer::kNo));
      case HubOp::kCheck: {
        bool all = true;
        while (!frame.at_end()) all = values_.contains(std::string(frame.take())) && all;
        return reply(guest, FrameWriter(all ? HubAnswer::kOk : HubAnswer::kNo));
      }
      case HubOp::kGet:
      case HubOp::kWait:
        stop_waiting(descriptor, guest);
        guest.wants_values = static_cast<HubOp>(frame.kind()) == HubOp::kGet;
        while (!frame.at_end()) guest.awaits.emplace_back(frame.take());
        if (is_served(guest)) return guest.awaits.clear();
        for (const std::string& key : guest.awaits) waiting_[key].insert(descriptor);
        return;
      case HubOp::kCancel:
        if (guest.awaits.empty()) return;  // the request has been answered already
        stop_waiting(descriptor, guest);
        return reply(guest, FrameWriter(HubAnswer::kNo));
      case HubOp::kCount:
        return reply(guest, FrameWriter(HubAnswer::kOk).put(static_cast<int64_t>(values_.size())));
      case HubOp::kHello:
        break;
    }
    raise(ErrorKind::kComm, "[comm.store] unknown request number {}", frame.kind());
  }

  // Answers the guest's kGet or kWait if all its keys are set; returns whether it did.
  bool is_served(Guest& guest) {
    FrameWriter writer(HubAnswer::kOk);
    for (const std::string& key : guest.awaits) {
      const auto found = values_.find(key);
      if (found == values_.end()) return false;
      if (guest.wants_values) writer.put(found->second);
    }
    reply(guest, std::move(writer));
    return true;
  }

  void stop_waiting(int descriptor, Guest& guest) {
    for (const std::string& key : guest.awaits) {
      const auto found = waiting_.find(key);
      if (found == waiting_.end()) continue;
      found->second.erase(descriptor);
      if (found->second.empty()) waiting_.erase(found);
    }
    guest.awaits.clear();
  }

  // Sets a key and answers the guests that waited for it. An error or a broken connection of a waiting guest must not
  // reach the guest that set the key: that connection is shut down here and dropped when its end is read.
  void store(const std::string& key, std::string value) {
    values_[key] = std::move(value);
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) return;
    const std::set<int> waiting = std::move(found->second);
    waiting_.erase(found);
    for (const int descriptor : waiting) {
      Guest& guest = guests_.at(descriptor);
      try {
        if (!is_served(guest)) continue;  // other keys of the guest are missing
      } catch (const Error&) {            // the answer would be longer than a frame may be
        ::shutdown(descriptor, SHUT_RDWR);
      }
      stop_waiting(descriptor, guest);
      if (!flush(guest)) ::shutdown(descriptor, SHUT_RDWR);
    }
  }

  // Sends what the socket accepts now. Returns false when the connection has ended, or when it leaves and everything
  // was sent.
  bool flush(Guest& guest) const {
    size_t sent = 0;
    bool open = true;
    while (sent < guest.out.size()) {
      const ssize_t count = ::send(guest.socket.get(), guest.out.data() + sent, guest.out.size() - sent, MSG_NOSIGNAL);
      if (count > 0) sent += static_cast<size_t>(count);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) {
        open = errno == EAGAIN;
        break;
      }
    }
    guest.out.erase(0, sent);
    if (guest.out.empty() && guest.out.capacity() > 65536) guest.out.shrink_to_fit();
    if (guest.awaits_room == guest.out.empty()) {
      guest.awaits_room = !guest.out.empty();
      attend(guest.socket.get(), EPOLLIN | (guest.awaits_room ? static_cast<uint32_t>(EPOLLOUT) : 0U), EPOLL_CTL_MOD);
    }
    return open && !(guest.leaves && guest.out.empty());
  }

  const HubIdentity identity_;
  UniqueFd listener_, wake_, poll_;
  mutable std::mutex mutex_;
  std::unordered_map<int, Guest> guests_;                   // by descriptor
  std::set<int> strangers_;                                 // descriptors of guests without an accepted hello
  std::unordered_map<std::string, std::string> values_;     // the store
  std::unordered_map<std::string, std::set<int>> waiting_;  // by key: descriptors of guests that wait for it
  HubFigures figures_;
  size_t warnings_ = 0, unknown_bytes_ = 0;
  bool listens_ = true;  // the listener is in epoll
  std::thread thread_;
};

HubServer::HubServer(UniqueFd listener, HubIdentity identity)
    : loop_(std::make_unique<Loop>(std::move(listener), std::move(identity))) {}
HubServer::~HubServer() = default;
HubFigures HubServer::figures() const { return loop_->figures(); }

}  // namespace tessera::comm
