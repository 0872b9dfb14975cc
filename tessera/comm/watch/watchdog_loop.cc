#include "tessera/comm/watch/watchdog_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/log.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kTick{500}, kPing{1000};
constexpr milliseconds kByeTimeout{500};  // time limit for peers to read this rank's bye
constexpr int kWakeEvent = -1;            // identifies the eventfd among the ranks in epoll's events

template <class Step>
void guarded(const Step& step) {
  try {
    step();
  } catch (const std::exception& error) {  // the watch continues
    log_warning("[comm.watchdog] {}", error.what());
  }
}

}  // namespace

WatchdogLoop::WatchdogLoop(int rank, milliseconds silence, FailureListener& listener)
    : rank_(rank),
      silence_(silence),
      listener_(listener),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      poll_(::epoll_create1(EPOLL_CLOEXEC)) {
  epoll_event own{.events = EPOLLIN, .data = {.fd = kWakeEvent}};
  TESSERA_CHECK(wake_.open() && poll_.open() && ::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, wake_.get(), &own) == 0,
                ErrorKind::kIo, "[comm.watchdog] eventfd and epoll: {}", std::strerror(errno));
}

void WatchdogLoop::add_peer(int rank, PeerSocket socket, std::vector<WatchdogFrame> early) {
  Peer& peer = peers_.emplace(rank, Peer{.socket = std::move(socket)}).first->second;
  register_with_epoll(rank, peer, true);
  for (WatchdogFrame& frame : early) early_.emplace_back(rank, std::move(frame));
}

void WatchdogLoop::register_with_epoll(int rank, Peer& peer, bool added) {
  peer.waits_for_writable = peer.socket.has_unsent();
  const uint32_t events = EPOLLIN | (peer.waits_for_writable ? EPOLLOUT : 0U);
  epoll_event event{.events = events, .data = {.fd = rank}};
  TESSERA_CHECK(::epoll_ctl(poll_.get(), added ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, peer.socket.descriptor(), &event) == 0,
                ErrorKind::kIo, "[comm.watchdog] the connection with rank {}: {}", rank, std::strerror(errno));
}

void WatchdogLoop::begin() {
  last_tick_ = Clock::now();
  for (auto& [rank, peer] : peers_) peer.heard = last_tick_;
  thread_ = std::thread([this] { run(); });
}

void WatchdogLoop::post(WatchdogFrameKind kind, std::string text) {
  const std::lock_guard lock(mutex_);
  outbox_.push_back({kind, rank_, std::move(text)});
  wake();
}

bool WatchdogLoop::report_call_failure(const CallFailure& failure) {
  post(WatchdogFrameKind::kCallFailure, to_text(failure));
  return true;
}

void WatchdogLoop::report_rank_failure(const std::string& text) {
  post(WatchdogFrameKind::kFailed, text.substr(0, 4000));
}

// Posts a kBye frame unless this rank has failed, and ends the loop. The frame and `stop_` are set under one lock of
// `mutex_`, so the loop sends the frame before it ends. The sockets are closed only after the loop's thread has ended;
// PeerSocket::finish() waits until a peer has read the frame, for at most kByeTimeout for all peers together.
void WatchdogLoop::leave(bool failed) noexcept {
  if (!thread_.joinable()) return;
  guarded([&] {
    {
      const std::lock_guard lock(mutex_);
      if (!failed) outbox_.push_back({WatchdogFrameKind::kBye, rank_});
      stop_ = true;
      wake();
    }
    thread_.join();
    const auto deadline = Clock::now() + kByeTimeout;
    for (auto& [rank, peer] : peers_) peer.socket.finish(deadline);
    peers_.clear();
  });
}

void WatchdogLoop::send(int to, const WatchdogFrame& frame) {
  const auto found = peers_.find(to);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  peer.socket.send(frame);  // an ended connection is noticed when it is read
  if (peer.socket.has_unsent() != peer.waits_for_writable) register_with_epoll(to, peer, false);
}

void WatchdogLoop::send_to_all(const WatchdogFrame& frame) {
  for (const auto& peer : peers_) guarded([&] { send(peer.first, frame); });
}

void WatchdogLoop::deliver_report(const FailureReport& report) {
  if (report_delivered_) return;
  report_delivered_ = true;
  listener_.on_failure_report(report);
}

void WatchdogLoop::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

// Between begin() and the join in leave() only this thread uses `peers_`, so `peers_` needs no lock. Other threads put
// their frames into `outbox_`. The loop sends the frames of `outbox_` before it obeys `stop_`, so the kBye frame of
// leave() is the last one.
void WatchdogLoop::run() {
  for (const auto& heard : std::exchange(early_, {})) guarded([&] { receive(heard.first, heard.second); });
  auto next_ping = Clock::now();
  for (;;) {
    std::vector<WatchdogFrame> own;
    bool stop = false;
    {
      const std::lock_guard lock(mutex_);
      own.swap(outbox_);
      stop = stop_;
    }
    for (const WatchdogFrame& frame : own) guarded([&] { send_own(frame); });
    if (stop) return;
    serve();
    if (Clock::now() >= next_ping) {
      next_ping = Clock::now() + kPing;
      ping_all();
    }
    guarded([&] {
      check_silence();
      on_tick();
      listener_.tick();
    });
  }
}

// Waits for events for at most one tick (500 ms), so that pings, silence checks and the listener's tick happen in time.
void WatchdogLoop::serve() {
  epoll_event events[64];
  const int count = ::epoll_wait(poll_.get(), events, 64, static_cast<int>(kTick.count()));
  for (int i = 0; i < count; ++i) {
    if (events[i].data.fd != kWakeEvent) {
      serve_peer(events[i].data.fd, events[i].events);
      continue;
    }
    uint64_t posted = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &posted, sizeof posted);
  }
}

// Handles all received frames before the end of the connection, because the last frame may be a kBye, by which a peer
// says that it leaves without an error. receive() may drop the peer, so on_lost_peer() is called only if the peer is
// still there.
void WatchdogLoop::serve_peer(int rank, uint32_t events) {
  const auto found = peers_.find(rank);
  if (found == peers_.end()) return;  // dropped by an earlier event of this round
  Peer& peer = found->second;
  if (events & EPOLLOUT) {
    peer.socket.flush();
    if (!peer.socket.has_unsent()) guarded([&] { register_with_epoll(rank, peer, false); });
  }
  if (!(events & ~static_cast<uint32_t>(EPOLLOUT))) return;
  peer.heard = Clock::now();
  std::vector<WatchdogFrame> frames;
  const bool open = peer.socket.receive(frames);
  for (const WatchdogFrame& frame : frames) guarded([&] { receive(rank, frame); });
  if (!open && peers_.erase(rank)) guarded([&] { on_lost_peer(rank, false); });
}

// A peer that has not read earlier frames gets no further ping, so that unsent data does not grow.
void WatchdogLoop::ping_all() {
  for (const auto& peer : peers_) {
    if (!peer.second.waits_for_writable) guarded([&] { send(peer.first, {WatchdogFrameKind::kPing, rank_}); });
  }
}

// A gap between two turns of this loop is a pause of this process (SIGSTOP, a debugger, a frozen machine). The gap is
// added to the times at which the peers were last heard, so that it does not count as silence of the peers.
void WatchdogLoop::check_silence() {
  const auto now = Clock::now();
  if (now - last_tick_ > 3 * kTick) {
    for (auto& [rank, peer] : peers_) peer.heard = std::min(now, peer.heard + (now - last_tick_));
  }
  last_tick_ = now;
  if (silence_ == milliseconds(0)) return;
  std::vector<int> silent;
  for (const auto& [rank, peer] : peers_) {
    if (now - peer.heard > silence_) silent.push_back(rank);
  }
  for (const int rank : silent) {
    peers_.erase(rank);
    on_lost_peer(rank, true);
  }
}

}  // namespace tessera::comm
