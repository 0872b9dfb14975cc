#include "tessera/comm/watch/watchdog.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/random_hex.h"
#include "tessera/comm/watch/diagnosis.h"
#include "tessera/comm/watch/watchdog_roles.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr const char* kKey = "watchdog";
constexpr const char* kNoWatch = "none";
// Key of a counter in the store that decides whether the run has a watchdog. Rank 0 adds kAllThere when all ranks have
// connected to it; this means yes. A rank that cannot reach rank 0 adds 1; this means no. add() is atomic and returns
// the sum, so exactly one rank adds first, and the first addition decides.
constexpr const char* kDecision = "decision";
constexpr int64_t kAllThere = 1 << 20;
constexpr const char* kUnreachable = "unreachable";  // key: message of the rank that cannot reach rank 0

constexpr milliseconds kAttempt{3000};      // limit to connect to one address of rank 0 and receive its answer
constexpr milliseconds kReach{20000};       // limit for all attempts, and at most half of the timeout
constexpr milliseconds kPollInterval{250};  // interval between checks of kDecision
// Rank 0 answers each rank that connects with a first frame. It sends a second frame when all ranks have connected,
// when there will be no watchdog, or when the start has failed. The other ranks wait this much beyond their own
// deadline for the second frame: rank 0 may have called start_watchdog() later and then has a later deadline.
constexpr milliseconds kDeadlineMargin{2000};

std::string get_text(c10d::Store& store, const char* key) {
  try {
    return store.get_to_str(key);
  } catch (const c10::Error& error) {
    raise(ErrorKind::kComm, "[comm.watchdog] rank 0 published no address of its watchdog: {}. Did rank 0 end?",
          first_line(error));
  }
}

// What rank 0 writes to the store so that the other ranks find its watchdog. The text is "PORT TOKEN ANSWER ADDRESS
// ...", with one or more addresses. A rank that connects sends the random word TOKEN, and rank 0 replies with the
// random word ANSWER, so each side knows that the other belongs to this run.
struct WatchdogEndpoint {
  int port = 0;
  std::string token, answer;  // random words: the first frame of a rank, and rank 0's answer
  std::vector<std::string> addresses = {};

  std::string text() const { return fmt::format("{} {} {} {}", port, token, answer, fmt::join(addresses, " ")); }
  static WatchdogEndpoint parse(const std::string& text) {
    WatchdogEndpoint result;
    std::istringstream words(text);
    words >> result.port >> result.token >> result.answer;
    TESSERA_CHECK(words && result.port > 0, ErrorKind::kComm,
                  "[comm.watchdog] the store holds no valid address of rank 0's watchdog");
    for (std::string address; words >> address;) result.addresses.push_back(address);
    return result;
  }
};

void warn_of_no_watch(const std::string& why) {
  log_warning(
      "[comm.watchdog] {}. There is no watchdog: a dead rank is noticed only when its connections end, or at a "
      "timeout.",
      why);
}

// Waits until the watchdogs of all other ranks have connected, and passes the connections to `hub`. A connection whose
// hello does not have the secret endpoint.token is ignored. Returns false when a rank has decided that no watchdog is
// used, because it cannot reach rank 0.
bool await_ranks(c10d::Store& store, ConnectionAcceptor& reception, const WatchdogEndpoint& endpoint,
                 const WatchdogOptions& options, PeerDeadline deadline, WatchdogHub& hub) {
  std::set<int> missing;
  for (int rank = 1; rank < options.size; ++rank) missing.insert(rank);
  while (!missing.empty()) {
    auto [socket, frames] = reception.next(std::min(deadline, Clock::now() + kPollInterval));
    if (!socket.open()) {
      if (store.check({kDecision})) return false;
      if (Clock::now() < deadline) continue;
      const std::string why =
          fmt::format("rank {} of {} did not connect in time: it has ended, or is stuck in its start-up",
                      list_ranks(missing), options.size);
      hub.refuse_all(why);
      raise(ErrorKind::kComm, "[comm.watchdog] {}", why);
    }
    const WatchdogFrame& hello = frames.front();
    if (hello.kind != WatchdogFrameKind::kHello || hello.text != endpoint.token || !missing.erase(hello.rank)) continue;
    const int rank = hello.rank;
    socket.send({WatchdogFrameKind::kHello, 0, endpoint.answer});
    frames.erase(frames.begin());
    hub.add_peer(rank, std::move(socket), std::move(frames));
  }
  return store.add(kDecision, kAllThere) == kAllThere;
}

// Starts the watchdog of rank 0, in these steps: listens; publishes the WatchdogEndpoint in the store; collects the
// connections of all other ranks; decides through the store's counter kDecision that the watchdog is used; confirms
// this to all ranks. Returns null if no watchdog is used, because rank 0 cannot listen or a rank cannot reach rank 0.
// The listening socket is closed on return.
std::unique_ptr<WatchdogLoop> start_hub(c10d::Store& store, const WatchdogOptions& options, FailureListener& listener,
                                        PeerDeadline deadline) {
  auto hub = std::make_unique<WatchdogHub>(options.silence, options.compare, listener);
  WatchdogEndpoint endpoint{.token = random_hex(16), .answer = random_hex(16)};
  std::optional<ConnectionAcceptor> reception;
  try {
    ListeningSocket here = listen_at(options.address, 0, options.reach);
    endpoint.port = here.port;
    endpoint.addresses = here.on_all_interfaces ? interface_addresses() : std::vector{here.address};
    reception.emplace(std::move(here.socket));
  } catch (const Error& error) {
    warn_of_no_watch(error.what());
    store.set(kKey, kNoWatch);
    return nullptr;
  }
  store.set(kKey, endpoint.text());
  if (!await_ranks(store, *reception, endpoint, options, deadline, *hub)) {
    hub->dismiss_all();
    warn_of_no_watch(get_text(store, kUnreachable));
    return nullptr;
  }
  hub->confirm_all();
  return hub;
}

// Tries one address once. Returns a closed socket when the process there is not rank 0 of this run. `frames` receives
// the frames after rank 0's answer.
PeerSocket try_address(const std::string& host, const WatchdogEndpoint& endpoint, int rank,
                       std::vector<WatchdogFrame>& frames, std::string& reason) {
  const auto deadline = Clock::now() + kAttempt;
  PeerSocket socket = connect_to(host, endpoint.port, deadline, reason);
  if (!socket.open()) return socket;
  socket.send({WatchdogFrameKind::kHello, rank, endpoint.token});
  frames = socket.await(deadline);
  if (!frames.empty() && frames.front().kind == WatchdogFrameKind::kHello && frames.front().text == endpoint.answer) {
    frames.erase(frames.begin());
    return socket;
  }
  reason = frames.empty() ? "no answer" : "an answer from a process that is not rank 0 of this run";
  return PeerSocket();
}

// Connects to rank 0. Returns a closed socket when there will be no watch, because some rank cannot connect.
PeerSocket reach_hub(c10d::Store& store, const WatchdogEndpoint& endpoint, const WatchdogOptions& options,
                     std::vector<WatchdogFrame>& frames) {
  std::vector<std::string> hosts = endpoint.addresses;
  if (std::ranges::find(hosts, options.address) == hosts.end()) hosts.insert(hosts.begin(), options.address);
  std::string tried;
  for (const auto limit = Clock::now() + std::min(kReach, options.timeout / 2); Clock::now() < limit;) {
    tried.clear();
    for (const std::string& host : hosts) {
      std::string reason;
      PeerSocket socket = try_address(host, endpoint, options.rank, frames, reason);
      if (socket.open()) return socket;
      tried += fmt::format("{}{}: {}", tried.empty() ? "" : ", ", host, reason);
    }
    if (store.check({kDecision})) break;
    std::this_thread::sleep_for(kPollInterval);
  }
  if (store.check({kUnreachable})) return PeerSocket();
  const std::string why =
      fmt::format("rank {} cannot reach rank 0 at port {} ({})", options.rank, endpoint.port, tried);
  store.set(kUnreachable, why);
  // Adds 1 to the counter kDecision. If add() returns kAllThere + 1, rank 0 had added kAllThere first and so decided
  // that the watchdog is used. Rank 0 has then received this rank's hello, but the answer of rank 0 came too late for
  // this rank. Rank 0 now watches this rank and would report it as dead, so this rank must fail.
  TESSERA_CHECK(store.add(kDecision, 1) != kAllThere + 1, ErrorKind::kComm, "[comm.watchdog] {}", why);
  return PeerSocket();
}

// Starts the watchdog of a rank other than 0: connects to rank 0, then waits for the hub's second frame. This frame is
// a hello (all ranks are connected), a kBye (there will be no watch), or a failure report with the error of rank 0.
std::unique_ptr<WatchdogLoop> start_spoke(c10d::Store& store, const WatchdogOptions& options, FailureListener& listener,
                                          PeerDeadline deadline) {
  const std::string endpoint_text = get_text(store, kKey);
  if (endpoint_text == kNoWatch) return nullptr;
  auto spoke = std::make_unique<WatchdogSpoke>(options.rank, options.silence, listener);
  std::vector<WatchdogFrame> frames;
  PeerSocket hub = reach_hub(store, WatchdogEndpoint::parse(endpoint_text), options, frames);
  if (!hub.open()) return nullptr;
  // Once all ranks are connected, the hub sends a second hello, which is awaited here. The hub sends pings only after
  // this hello.
  if (frames.empty()) frames = hub.await(deadline + kDeadlineMargin);
  TESSERA_CHECK(!frames.empty(), ErrorKind::kComm,
                "[comm.watchdog] rank 0 did not confirm in time that all ranks are connected");
  const WatchdogFrame& first = frames.front();
  if (first.kind == WatchdogFrameKind::kFailureReport) {
    raise(ErrorKind::kComm, "[comm.watchdog] {}", parse_failure_report(first.text).text);
  }
  if (first.kind == WatchdogFrameKind::kBye) return nullptr;
  spoke->add_peer(0, std::move(hub), std::move(frames));
  return spoke;
}

}  // namespace

std::unique_ptr<FailureReporter> start_watchdog(c10d::Store& store, const WatchdogOptions& options,
                                                FailureListener& listener) {
  const auto deadline = Clock::now() + options.timeout;
  std::unique_ptr<WatchdogLoop> loop;
  try {
    loop = options.rank == 0 ? start_hub(store, options, listener, deadline)
                             : start_spoke(store, options, listener, deadline);
  } catch (const c10::Error& error) {  // the store has ended: it is usually in rank 0's process
    raise(ErrorKind::kComm, "[comm.watchdog] rank {} of {} lost the store: {}. Did rank 0 end?", options.rank,
          options.size, first_line(error));
  }
  if (loop) loop->begin();
  return loop;
}

}  // namespace tessera::comm
