#include "tessera/comm/shm/channel.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::comm::shm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// How long looking again pays. A sleep and a wake cost 5 us and more on each side, pieces of large messages some 50 us.
constexpr microseconds kCallerSpin{100}, kWorkerSpin{10};
// With more ranks than cores the core is what the peer waits for. When others than the peers want it too, a sleeper
// gets it back sooner than one that yields.
constexpr int kYields = 20;
constexpr microseconds kLongYield{50};
constexpr nanoseconds kSlice = milliseconds(100);
constexpr milliseconds kEndOfAProcess{2000}, kLookAgain{5}, kHalfBroken{100};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void initialize(SharedMemory& memory, int size) {
  const Layout layout(size);
  TESSERA_CHECK(memory.bytes() == layout.bytes(), ErrorKind::kInternal, "[comm.shm] {} bytes for {} ranks, wanted {}",
                memory.bytes(), size, layout.bytes());
  new (memory.data()) Head;
  for (int rank = 0; rank < size; ++rank) {
    new (memory.data() + layout.words(rank)) RankWords;
    for (int to = 0; to < size; ++to) new (memory.data() + layout.pair(rank, to)) PairWords;
  }
}

Channel::Channel(std::shared_ptr<SharedMemory> memory, ChannelOptions options)
    : memory_(std::move(memory)),
      options_(std::move(options)),
      layout_(options_.size),
      rounds_(head().rounds, options_.size) {
  TESSERA_CHECK(memory_->bytes() == layout_.bytes() && head().version == kVersion, ErrorKind::kInternal,
                "[comm.shm] shared memory of {} bytes, version {}: wanted {}, {}", memory_->bytes(), head().version,
                layout_.bytes(), kVersion);
  const auto& processes = options_.processes;
  same_process_ =
      std::all_of(processes.begin(), processes.end(), [&](pid_t process) { return process == processes[0]; });
  for (int peer = 0; peer < size(); ++peer) {
    if (same_process(peer)) continue;
    watched_.emplace_back(peer, Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, processes[peer], 0))));
  }
}

Channel::~Channel() { leave(); }

void Channel::leave() noexcept {
  words(rank()).left.store(1);
  head().rounds.bell.ring_always();
  for (int peer = 0; peer < size(); ++peer) words(peer).doorbell.ring_always();
}

std::string Channel::name_of(int rank) const {
  return fmt::format("rank {}", options_.ranks.empty() ? rank : options_.ranks[rank]);
}

std::optional<Place> Channel::show(const void* data, size_t bytes) const {
  Place place{.address = reinterpret_cast<uint64_t>(data), .shared = {}};
  if (same_process_) return place;
  if (!options_.views) return std::nullopt;
  const auto shared = find_shared(data, bytes);
  if (!shared) return std::nullopt;
  place.shared = *shared;
  return place;
}

const std::byte* Channel::look(int rank, const Place& place, size_t bytes) {
  if (same_process(rank)) return reinterpret_cast<const std::byte*>(place.address);
  auto found = views_.find(place.shared.buffer);
  if (found == views_.end()) {
    try {
      found = views_.emplace(place.shared.buffer, SharedView(options_.processes[rank], place.shared)).first;
    } catch (const Error& error) {
      fail_to_look(rank, error);
    }
    mapped_ = true;
  }
  const SharedView& view = found->second;
  TESSERA_CHECK(place.shared.offset <= view.bytes() && bytes <= view.bytes() - place.shared.offset,
                ErrorKind::kInternal, "[comm.shm] {} shows {} bytes at {} of a buffer of {}", name_of(rank), bytes,
                place.shared.offset, view.bytes());
  return view.at(place.shared);
}

void Channel::forget_freed() {
  if (!std::exchange(mapped_, false)) return;
  std::erase_if(views_, [](const auto& view) { return view.second.is_freed(); });
}

// A process that is killed closes its files a moment before it counts as ended.
void Channel::fail_to_look(int rank, const Error& error) {
  for (const auto limit = Clock::now() + kEndOfAProcess; Clock::now() < limit; std::this_thread::sleep_for(kLookAgain)) {
    if (is_broken()) throw_broken();
    const std::string dead = who_died();
    if (!dead.empty()) fail(dead);
  }
  fail(fmt::format("{} cannot read the memory of {}: {}", name_of(this->rank()), name_of(rank), error.what()));
}

void Channel::arrive() {
  words(rank()).arrived.store(rounds_.next());
  rounds_.arrive();
}

void Channel::wait(Patience patience, Clock::time_point deadline) {
  if (rounds_.complete()) return;
  Waiter waiter(*this, patience, deadline);
  rounds_.wait(waiter);
}

void Channel::break_off(const std::exception& error) noexcept {
  break_off(error.what(), dynamic_cast<const Disagreement*>(&error) != nullptr);
}

void Channel::break_off(const std::string& reason, bool disagreement) noexcept {
  if (head().breaking.fetch_add(1) == 0) {
    std::strncpy(head().reason, reason.c_str(), kReasonBytes - 1);
    head().disagreement = disagreement;
  } else {  // another rank is about to; it may end before it has
    for (const auto limit = Clock::now() + kHalfBroken; !is_broken() && Clock::now() < limit;) ::sched_yield();
    if (is_broken()) return;
  }
  rounds_.break_off();
  for (int peer = 0; peer < size(); ++peer) words(peer).doorbell.ring_always();
}

void Channel::throw_broken() const {
  if (head().disagreement) throw Disagreement(head().reason);
  throw PeerFailed(head().reason);
}

void Channel::fail(const std::string& reason) {
  break_off(reason);
  if (is_broken()) throw_broken();  // a rank that ends for a reason is a reason for the next one: the first one counts
  throw PeerFailed(reason);
}

std::string Channel::who_died() const {
  for (const auto& [peer, watch] : watched_) {
    pollfd state{.fd = watch.get(), .events = POLLIN, .revents = 0};
    const bool ended =
        watch.get() >= 0 ? ::poll(&state, 1, 0) > 0 : ::kill(options_.processes[peer], 0) != 0 && errno == ESRCH;
    if (ended && !has_left(peer)) {
      return fmt::format("{} (process {}) has ended", name_of(peer), options_.processes[peer]);
    }
  }
  return "";
}

void Channel::await_readers() {
  for (int peer = 0; peer < size(); ++peer) {
    if (!same_process(peer)) continue;
    while (words(peer).reading.load() != 0) ::sched_yield();
  }
}

Reading::Reading(Channel& channel) : channel_(channel) {
  channel_.words(channel_.rank()).reading.fetch_add(1);
  if (channel_.is_broken()) end();
}

Reading::~Reading() {
  if (reads_) channel_.words(channel_.rank()).reading.fetch_add(static_cast<uint32_t>(-1));
}

// The order of these two is that of what was read before.
void Reading::end() {
  reads_ = false;
  channel_.words(channel_.rank()).reading.fetch_add(static_cast<uint32_t>(-1));
  if (channel_.is_broken()) channel_.throw_broken();
}

std::string Channel::who_left() const {
  for (int peer = 0; peer < size(); ++peer) {
    if (has_left(peer) && at<RankWords>(layout_.words(peer))->arrived.load() < rounds_.round()) return name_of(peer);
  }
  return "";
}

std::string Channel::who_is_missing() const {
  std::string missing;
  for (int peer = 0; peer < size(); ++peer) {
    if (at<RankWords>(layout_.words(peer))->arrived.load() < rounds_.round()) {
      missing += (missing.empty() ? "" : ", ") + name_of(peer);
    }
  }
  return missing;
}

bool Waiter::spin() {
  if (channel_.crowded()) {
    if (++looked_ > kYields) return false;
    const auto before = Clock::now();
    ::sched_yield();
    return Clock::now() - before < kLongYield;
  }
  pause();
  if (++looked_ % 16 != 0) return true;
  const auto now = Clock::now();
  if (began_ == Clock::time_point{}) began_ = now;
  return now - began_ < (patience_ == Patience::kCaller ? kCallerSpin : kWorkerSpin);
}

void Waiter::sleep(Native::Word32& word, uint32_t seen) {
  const auto before = Clock::now();
  const nanoseconds left = deadline_ - before;
  if (left <= nanoseconds(0)) {
    const std::string missing = channel_.who_is_missing();
    if (missing.empty()) return;  // the last one has just come
    channel_.fail(fmt::format("timed out: {} did not arrive", missing));
  }
  const std::string gone = channel_.who_left();
  if (!gone.empty()) channel_.fail(gone + " has left the group");
  const nanoseconds slice = std::min(left, kSlice);
  Native::sleep(word, seen, slice);
  if (Clock::now() - before < slice) return;
  const std::string dead = channel_.who_died();
  if (!dead.empty() && !channel_.complete()) channel_.fail(dead);  // a rank may end after its part in the round
}

}  // namespace tessera::comm::shm
