#include "tessera/comm/shm/channel.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::comm::shm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kEndOfAProcess{2000}, kLookAgain{5}, kHalfBroken{100};

}  // namespace

void initialize(SharedMemory& memory, int size) {
  const Layout layout(size);
  TESSERA_CHECK(memory.bytes() == layout.bytes(), ErrorKind::kInternal, "[comm.shm] {} bytes for {} ranks, wanted {}",
                memory.bytes(), size, layout.bytes());
  new (memory.data()) Head;
  for (int rank = 0; rank < size; ++rank) {
    new (memory.data() + layout.words(rank)) RankWords;
    for (int to = 0; to < size; ++to) new (memory.data() + layout.ring(rank, to)) Ring<Native>;
  }
}

// A pidfd per process lets dead_rank_text() poll for the end of a peer, also when its process id is reused. Where
// pidfd_open(2) is not available the descriptor is -1 and kill(pid, 0) is used instead.
Channel::Channel(std::shared_ptr<SharedMemory> memory, ChannelOptions options)
    : memory_(std::move(memory)),
      options_(std::move(options)),
      layout_(options_.size),
      rounds_(head().rounds, all_bells(), options_.rank) {
  TESSERA_CHECK(memory_->bytes() == layout_.bytes() && head().version == kVersion, ErrorKind::kInternal,
                "[comm.shm] shared memory of {} bytes, version {}: wanted {}, {}", memory_->bytes(), head().version,
                layout_.bytes(), kVersion);
  const auto& processes = options_.processes;
  same_process_ = std::ranges::all_of(processes, [&](pid_t process) { return process == processes[0]; });
  for (int peer = 0; peer < size(); ++peer) {
    if (same_process(peer)) continue;
    watched_.emplace_back(peer, UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, processes[peer], 0))));
  }
}

Channel::~Channel() { leave(); }

std::vector<RankEventCounts<Native>*> Channel::all_bells() const {
  std::vector<RankEventCounts<Native>*> all;
  for (int rank = 0; rank < size(); ++rank) all.push_back(&bells(rank));
  return all;
}

void Channel::leave() noexcept {
  words(rank()).left.store(1);
  for (int peer = 0; peer < size(); ++peer) bells(peer).ring_unconditionally();
}

std::string Channel::name_of(int rank) const {
  return fmt::format("rank {}", options_.ranks.empty() ? rank : options_.ranks[rank]);
}

std::optional<MessagePlace> Channel::show(const void* data, size_t bytes) const {
  MessagePlace place{.address = reinterpret_cast<uint64_t>(data), .shared = {}};
  if (same_process_) return place;
  if (!options_.views) return std::nullopt;
  const auto shared = find_shared(data, bytes);
  if (!shared) return std::nullopt;
  place.shared = *shared;
  return place;
}

// Returns the address of memory of another rank. Mappings of other processes' buffers are cached by the buffer's random
// id, which is never used twice. The offset in `place` comes from another process, so it is checked against the size of
// the mapping.
const std::byte* Channel::look(int rank, const MessagePlace& place, size_t bytes) {
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

void Channel::unmap_freed_buffers() {
  if (!std::exchange(mapped_, false)) return;
  std::erase_if(views_, [](const auto& view) { return view.second.is_freed(); });
}

// Called when memory of `rank` cannot be opened. If the process of a rank is killed, the kernel closes the process's
// files a moment before the process counts as ended, and from then on its buffers cannot be opened. So fail_to_look()
// waits up to 2 s for the end of the process, and the error then names the dead rank.
void Channel::fail_to_look(int rank, const Error& error) {
  for (const auto limit = Clock::now() + kEndOfAProcess; Clock::now() < limit;
       std::this_thread::sleep_for(kLookAgain)) {
    if (is_aborted()) throw_abort_reason();
    const std::string dead = dead_rank_text();
    if (!dead.empty()) fail(dead);
  }
  fail(fmt::format("{} cannot read the memory of {}: {}", name_of(this->rank()), name_of(rank), error.what()));
}

// Counts this rank as arrived in the round before it sets the rank's word `arrived`. If the rank dies in between, the
// round can complete, and only error texts say that the rank has not arrived. The opposite order would be wrong:
// `arrived` could be set although the rank was not counted, and left_rank_name() would not notice that the round can
// never complete.
void Channel::arrive() {
  rounds_.arrive();
  words(rank()).arrived.store(rounds_.round());
}

bool Channel::ready() const {
  const RoundState state = rounds_.state();
  if (state == RoundState::kBroken) throw_abort_reason();
  return state == RoundState::kComplete;
}

void Channel::abort_group(const std::exception& error) noexcept {
  abort_group(error.what(), dynamic_cast<const Disagreement*>(&error) ? AbortReason::kDisagreement
                            : dynamic_cast<const TimedOut*>(&error)   ? AbortReason::kTimedOut
                                                                      : AbortReason::kPeerFailed);
}

// `breaking` counts the callers of abort_group(). Only the first caller writes the reason of the abort, and sets
// `broken` afterwards, so a rank that sees `broken` reads a complete reason. A later caller waits up to 100 ms until
// `broken` is set. Then it sets `broken` itself, because the process of the first caller may have died before it did
// so; the reason may then be incomplete.
void Channel::abort_group(const std::string& reason, AbortReason kind) noexcept {
  if (head().breaking.fetch_add(1) == 0) {
    std::strncpy(head().reason, reason.c_str(), kReasonBytes - 1);
    head().kind = kind;
  } else {
    for (const auto limit = Clock::now() + kHalfBroken; !is_aborted() && Clock::now() < limit;) ::sched_yield();
    if (is_aborted()) return;
  }
  rounds_.abort_group();
}

void Channel::throw_abort_reason() const {
  switch (head().kind) {
    case AbortReason::kDisagreement:
      throw Disagreement(head().reason);
    case AbortReason::kTimedOut:
      throw TimedOut(head().reason);
    case AbortReason::kPeerFailed:
      break;
  }
  throw PeerFailed(head().reason);
}

void Channel::fail(const std::string& reason, AbortReason kind) {
  abort_group(reason, kind);
  throw_abort_reason();  // the first reason, which may be another rank's: later failures are its consequences
}

std::string Channel::dead_rank_text() const {
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
    while (words(peer).readers.are_there()) ::sched_yield();
  }
}

InPlaceRead::InPlaceRead(Channel& channel) : channel_(channel) {
  if (!readers().enter(channel.head().rounds.broken)) channel.throw_abort_reason();
}

InPlaceRead::~InPlaceRead() {
  if (reads_) readers().leave(channel_.head().rounds.broken);
}

void InPlaceRead::end() {
  reads_ = false;
  if (!readers().leave(channel_.head().rounds.broken)) channel_.throw_abort_reason();
}

InPlaceReaderCount<Native>& InPlaceRead::readers() const { return channel_.words(channel_.rank()).readers; }

std::string Channel::left_rank_name() const {
  for (int peer = 0; peer < size(); ++peer) {
    if (has_left(peer) && words(peer).arrived.load() < rounds_.round()) return name_of(peer);
  }
  return "";
}

std::vector<bool> Channel::left_by_rank() const {
  std::vector<bool> left(size());
  for (int peer = 0; peer < size(); ++peer) left[peer] = has_left(peer);
  return left;
}

std::string Channel::missing_rank_names() const {
  std::string missing;
  for (int peer = 0; peer < size(); ++peer) {
    if (words(peer).arrived.load() < rounds_.round()) missing += (missing.empty() ? "" : ", ") + name_of(peer);
  }
  return missing;
}

}  // namespace tessera::comm::shm
