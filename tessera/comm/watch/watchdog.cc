#include "tessera/comm/watch/watchdog.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/errors/libtorch_error.h"
#include "tessera/comm/watch/peer_socket.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr milliseconds kTick{500}, kPing{1000};
constexpr milliseconds kAnswers{2000};    // for all ranks to say where they are
constexpr milliseconds kLastWords{1000};  // for a rank that broke a connection to be seen to end
constexpr milliseconds kFarewell{500};    // for peers to hear that this rank leaves

std::string random_token() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", device(), device(), device(), device());
}

std::string text_of(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

std::string to_text(const Trouble& trouble) {
  return text_of({{"group", trouble.group},
                  {"sequence", trouble.sequence},
                  {"text", trouble.text},
                  {"timed_out", trouble.timed_out}});
}
Trouble trouble_of(const std::string& text) {
  const json value = json::parse(text);
  return {.group = value.at("group"),
          .sequence = value.at("sequence"),
          .text = value.at("text"),
          .timed_out = value.at("timed_out")};
}

std::string to_text(const Verdict& verdict) {
  return text_of({{"text", verdict.text}, {"culprit", verdict.culprit}, {"consequence", verdict.consequence}});
}
Verdict verdict_of(const std::string& text) {
  const json value = json::parse(text);
  return {.text = value.at("text"), .culprit = value.at("culprit"), .consequence = value.at("consequence")};
}

}  // namespace

// What both kinds of rank do, on a thread of its own: serve sockets, send what other threads want sent, keep time.
class Watchdog::Loop {
 public:
  Loop(const WatchdogOptions& options, PeerListener& listener)
      : options_(options), listener_(listener), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    TESSERA_CHECK(wake_.open(), ErrorKind::kIo, "[comm.watchdog] eventfd: {}", std::strerror(errno));
  }
  virtual ~Loop() = default;

  void begin() {
    last_tick_ = Clock::now();
    for (auto& [rank, peer] : peers_) peer.heard = last_tick_;
    thread_ = std::thread([this] { run(); });
  }
  void post(FrameKind kind, std::string text = "") {
    const std::lock_guard lock(mutex_);
    outbox_.push_back({kind, options_.rank, std::move(text)});
    wake();
  }
  // Says farewell unless `failed`, and ends the thread. The bye is the last thing it does: peers close their end when
  // they read it, and a loop that still served them would take that for their death.
  void end(bool failed) {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      if (!failed) outbox_.push_back({FrameKind::kBye, options_.rank});
      stop_ = true;
      wake();
    }
    thread_.join();
    const auto deadline = Clock::now() + kFarewell;
    for (auto& [rank, peer] : peers_) peer.socket.finish(deadline);
    peers_.clear();
  }

 protected:
  struct Peer {
    PeerSocket socket;
    Clock::time_point heard{};
  };

  // What came with the connections, before anything else is read from them.
  virtual void receive_early() = 0;
  // From this rank's own threads, from a peer, and when a peer's connection has ended or fallen silent.
  virtual void send_own(const Frame& frame) = 0;
  virtual void receive(int from, const Frame& frame) = 0;
  virtual void lose(int peer, bool silent) = 0;
  virtual void on_tick() {}

  void announce(const Verdict& verdict) {
    if (heard_verdict_) return;
    heard_verdict_ = true;
    listener_.hear(verdict);
  }

  const WatchdogOptions options_;
  PeerListener& listener_;
  std::map<int, Peer> peers_;

 private:
  void wake() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.descriptor(), &one, sizeof one);
  }

  void run() {
    guarded([&] { receive_early(); });
    auto next_ping = Clock::now();
    for (;;) {
      std::vector<Frame> own;
      bool stop = false;
      {
        const std::lock_guard lock(mutex_);
        own.swap(outbox_);
        stop = stop_;
      }
      for (const Frame& frame : own) guarded([&] { send_own(frame); });
      if (stop) return;
      serve();
      if (Clock::now() >= next_ping) {
        next_ping = Clock::now() + kPing;
        for (auto& [rank, peer] : peers_) peer.socket.send({FrameKind::kPing, options_.rank});
      }
      guarded([&] {
        check_silence();
        on_tick();
        listener_.tick();
      });
    }
  }

  template <class Step>
  void guarded(const Step& step) {
    try {
      step();
    } catch (const std::exception& error) {  // the watch goes on
      log_warning("[comm.watchdog] {}", error.what());
    }
  }

  void serve() {
    std::vector<pollfd> polled = {{wake_.descriptor(), POLLIN, 0}};
    std::vector<int> ranks = {-1};
    for (const auto& [rank, peer] : peers_) {
      polled.push_back({peer.socket.descriptor(), POLLIN, 0});
      ranks.push_back(rank);
    }
    ::poll(polled.data(), polled.size(), static_cast<int>(kTick.count()));
    uint64_t count = 0;
    if (polled[0].revents) [[maybe_unused]]
      const ssize_t got = ::read(wake_.descriptor(), &count, sizeof count);
    for (size_t i = 1; i < polled.size(); ++i) {
      const auto peer = peers_.find(ranks[i]);
      if (!polled[i].revents || peer == peers_.end()) continue;
      peer->second.heard = Clock::now();
      std::vector<Frame> frames;
      const bool open = peer->second.socket.receive(frames);
      for (const Frame& frame : frames) guarded([&] { receive(ranks[i], frame); });
      if (!open && peers_.erase(ranks[i])) guarded([&] { lose(ranks[i], false); });
    }
  }

  // A pause of this process (SIGSTOP, a debugger, a frozen machine) is not its peers' silence.
  void check_silence() {
    const auto now = Clock::now();
    if (now - last_tick_ > 3 * kTick) {
      for (auto& [rank, peer] : peers_) peer.heard = std::min(now, peer.heard + (now - last_tick_));
    }
    last_tick_ = now;
    if (options_.silence == milliseconds(0)) return;
    std::vector<int> silent;
    for (const auto& [rank, peer] : peers_) {
      if (now - peer.heard > options_.silence) silent.push_back(rank);
    }
    for (const int rank : silent) {
      peers_.erase(rank);
      lose(rank, true);
    }
  }

  PeerSocket wake_;  // an eventfd
  std::mutex mutex_;
  std::vector<Frame> outbox_;
  bool stop_ = false;
  bool heard_verdict_ = false;
  Clock::time_point last_tick_{};
  std::thread thread_;
};

namespace {

Verdict verdict_on_lost(int rank, bool silent, milliseconds silence) {
  if (!silent) {
    return {.text = fmt::format("rank {} has ended without a word: it was killed or it crashed", rank),
            .culprit = rank,
            .consequence = true};
  }
  return {
      .text = fmt::format("rank {} has not been heard of for {} s: it is stopped, or its host is down or unreachable",
                          rank, silence.count() / 1000),
      .culprit = rank,
      .consequence = true};
}

}  // namespace

class Watchdog::Spoke final : public Watchdog::Loop {
 public:
  // Waits until the hub has all ranks: only then will it be heard of every second.
  Spoke(const WatchdogOptions& options, PeerListener& listener, PeerSocket hub, const std::string& token,
        PeerDeadline deadline)
      : Loop(options, listener) {
    hub.send({FrameKind::kHello, options.rank, token});
    early_ = hub.await(deadline);
    TESSERA_CHECK(!early_.empty(), ErrorKind::kComm,
                  "[comm.watchdog] rank 0 gave no sign in time: a rank has not come this far");
    peers_.emplace(0, Peer{std::move(hub)});
  }

 private:
  void send_own(const Frame& frame) override {
    if (const auto hub = peers_.find(0); hub != peers_.end()) hub->second.socket.send(frame);
  }
  void receive(int, const Frame& frame) override {
    if (frame.kind == FrameKind::kBye) peers_.erase(0);  // nobody is left to watch over us
    if (frame.kind == FrameKind::kVerdict) announce(verdict_of(frame.text));
    if (frame.kind == FrameKind::kAsk) {
      const Trouble trouble = trouble_of(frame.text);
      send_own({FrameKind::kStatus, options_.rank, to_json(listener_.where(trouble.group, trouble.sequence))});
    }
  }
  void lose(int, bool silent) override { announce(verdict_on_lost(0, silent, options_.silence)); }
  void receive_early() override {
    for (const Frame& frame : std::exchange(early_, {})) receive(0, frame);
  }

  std::vector<Frame> early_;
};

class Watchdog::Hub final : public Watchdog::Loop {
 public:
  using Loop::Loop;
  void admit(int rank, PeerSocket socket, std::vector<Frame> frames) {
    peers_.emplace(rank, Peer{std::move(socket)});
    for (size_t i = 1; i < frames.size(); ++i) early_.emplace_back(rank, std::move(frames[i]));
  }
  void welcome_all() { tell_all({FrameKind::kHello, 0}); }

 private:
  struct Inquiry {
    Trouble trouble;
    int rank = 0;  // that reported it
    Clock::time_point begun{};
    std::map<int, FlightRecord> answers;
  };

  void send_own(const Frame& frame) override { receive(0, frame); }

  void receive(int from, const Frame& frame) override {
    switch (frame.kind) {
      case FrameKind::kBye:
        if (from == 0) tell_all(frame);
        left_.insert(from);
        peers_.erase(from);
        break;
      case FrameKind::kFailed:
        settle({.text = fmt::format("rank {} failed: {}", from, frame.text), .culprit = from, .consequence = true});
        break;
      case FrameKind::kTrouble:
        inquire(from, trouble_of(frame.text));
        break;
      case FrameKind::kStatus:
        if (inquiry_)
          inquiry_->answers[from] = parse_flight_record(frame.text, fmt::format("the answer of rank {}", from));
        break;
      default:
        break;
    }
  }

  void lose(int rank, bool silent) override { settle(verdict_on_lost(rank, silent, options_.silence)); }

  void inquire(int rank, Trouble trouble) {
    if (verdict_) return;
    if (inquiry_) {
      inquiry_->trouble.timed_out |= trouble.timed_out;
      return;
    }
    inquiry_ = Inquiry{.trouble = std::move(trouble), .rank = rank, .begun = Clock::now(), .answers = {}};
    if (!options_.compare) return;
    inquiry_->answers[0] = listener_.where(inquiry_->trouble.group, inquiry_->trouble.sequence);
    tell_all({FrameKind::kAsk, 0, to_text(inquiry_->trouble)});
  }

  void receive_early() override {
    for (const auto& [rank, frame] : std::exchange(early_, {})) receive(rank, frame);
  }

  void on_tick() override {
    if (!inquiry_ || verdict_) return;
    const auto waited = Clock::now() - inquiry_->begun;
    const bool complete = !options_.compare || inquiry_->answers.size() == peers_.size() + 1;
    if (!complete && waited < kAnswers) return;
    // A connection that broke is most often that of a rank which ends: its end says more than what the others see.
    if (!inquiry_->trouble.timed_out && waited < kLastWords) return;
    std::vector<FlightRecord> records;
    for (const auto& [rank, record] : inquiry_->answers) records.push_back(record);
    settle(judge(records, left_, inquiry_->trouble, inquiry_->rank));
  }

  void settle(const Verdict& verdict) {
    if (verdict_) return;
    verdict_ = verdict;
    tell_all({FrameKind::kVerdict, 0, to_text(verdict)});
    announce(verdict);
  }

  void tell_all(const Frame& frame) {
    for (auto& [rank, peer] : peers_) peer.socket.send(frame);
  }

  std::optional<Inquiry> inquiry_;
  std::optional<Verdict> verdict_;
  std::set<int> left_;
  std::vector<std::pair<int, Frame>> early_;
};

namespace {

constexpr const char* kKey = "watchdog";
constexpr const char* kNoWatch = "none";

void set_text(c10d::Store& store, const std::string& text) {
  store.set(kKey, std::vector<uint8_t>(text.begin(), text.end()));
}

std::string get_text(c10d::Store& store) {
  try {
    const auto bytes = store.get(kKey);
    return {bytes.begin(), bytes.end()};
  } catch (const c10::Error& error) {
    raise(ErrorKind::kComm, "[comm.watchdog] rank 0 gave no address: {}. Did it end?", first_line(error));
  }
}

// Collects the connections of all other ranks; those who do not know the token are none.
template <class Admit>
void await_ranks(PeerSocket& listener, int size, const std::string& token, PeerDeadline deadline, const Admit& admit) {
  std::set<int> missing;
  for (int rank = 1; rank < size; ++rank) missing.insert(rank);
  while (!missing.empty()) {
    auto [socket, frames] = accept_peer(listener, deadline);
    TESSERA_CHECK(socket.open(), ErrorKind::kComm, "[comm.watchdog] rank {} of {} did not connect in time",
                  *missing.begin(), size);
    const Frame& hello = frames.front();
    if (hello.kind != FrameKind::kHello || hello.text != token || !missing.erase(hello.rank)) continue;
    admit(hello.rank, std::move(socket), std::move(frames));
  }
}

}  // namespace

std::unique_ptr<Watchdog> Watchdog::start(c10d::Store& store, const WatchdogOptions& options, PeerListener& listener) {
  const auto deadline = Clock::now() + options.timeout;
  std::unique_ptr<Loop> loop;
  if (options.rank == 0) {
    auto hub = std::make_unique<Hub>(options, listener);
    PeerSocket socket;
    std::string endpoint;
    try {
      std::tie(socket, endpoint) = listen_for_peers(options.address);
    } catch (const Error& error) {
      log_warning("{}. Ranks that die are noticed by the ends of their connections and at timeouts only.",
                  error.what());
      set_text(store, kNoWatch);
      return nullptr;
    }
    const std::string token = random_token();
    set_text(store, endpoint + " " + token);
    await_ranks(socket, options.size, token, deadline, [&](int rank, PeerSocket peer, std::vector<Frame> frames) {
      hub->admit(rank, std::move(peer), std::move(frames));
    });
    hub->welcome_all();
    loop = std::move(hub);
  } else {
    const std::string said = get_text(store);
    if (said == kNoWatch) return nullptr;
    const size_t space = said.find(' ');
    TESSERA_CHECK(space != said.npos, ErrorKind::kComm, "[comm.watchdog] rank 0 left no address");
    loop = std::make_unique<Spoke>(options, listener, connect_to(said.substr(0, space), deadline),
                                   said.substr(space + 1), deadline);
  }
  loop->begin();
  return std::unique_ptr<Watchdog>(new Watchdog(std::move(loop)));
}

Watchdog::Watchdog(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}
Watchdog::~Watchdog() { leave(false); }

bool Watchdog::report_trouble(const Trouble& trouble) {
  loop_->post(FrameKind::kTrouble, to_text(trouble));
  return true;
}
void Watchdog::report_failure(const std::string& text) { loop_->post(FrameKind::kFailed, text.substr(0, 4000)); }

void Watchdog::leave(bool failed) noexcept {
  try {
    loop_->end(failed);
  } catch (const std::exception& error) {
    log_warning("[comm.watchdog] {}", error.what());
  }
}

}  // namespace tessera::comm
