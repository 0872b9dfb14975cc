#include "tessera/comm/shm/mail.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::comm::shm {

using std::chrono::milliseconds;

MailWork::MailWork(std::shared_ptr<PostOffice> office, c10d::OpType type, int peer, int tag, const at::Tensor& tensor,
                   milliseconds timeout)
    : Work(office->channel().rank(), type),
      office_(std::move(office)),
      peer_(peer),
      tag_(tag),
      tensor_(tensor),
      data_(static_cast<std::byte*>(type == c10d::OpType::SEND ? const_cast<void*>(tensor.const_data_ptr())
                                                               : tensor.mutable_data_ptr())),
      bytes_(tensor.nbytes()),
      deadline_(Clock::now() + timeout) {}

bool MailWork::wait(milliseconds) {
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [this] { return completed_; });  // the office keeps the deadline
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

bool MailWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

void MailWork::abort() { office_->channel().break_off(office_->channel().name_of(rank_) + " broke off"); }

PostOffice::PostOffice(std::shared_ptr<Channel> channel)
    : channel_(std::move(channel)), sends_(channel_->size()), arriving_(channel_->size()) {}

PostOffice::~PostOffice() { shut_down(); }

void PostOffice::shut_down() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  channel_->words(channel_->rank()).doorbell.ring_always();
  if (thread_.joinable()) thread_.join();
}

void PostOffice::post(const Letter& work) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return work->finish(failure_);
    if (work->opType_ == c10d::OpType::SEND) {
      sends_[work->peer_].push_back(work);
      ++sends_left_;
    } else {
      receives_.push_back(work);
    }
    if (!thread_.joinable()) thread_ = std::thread([this] { this->work(); });
  }
  channel_->words(channel_->rank()).doorbell.ring_always();
}

size_t PostOffice::arriving_letters() const {
  return std::count_if(arriving_.begin(), arriving_.end(), [](const Arriving& arriving) { return arriving.letter; });
}

void PostOffice::work() {
  ::pthread_setname_np(::pthread_self(), "tessera shm mail");
  auto& bell = channel_->words(channel_->rank()).doorbell;
  for (;;) {
    bell.sleepers.fetch_add(1);
    const uint32_t seen = bell.count.load();
    bool moved = false, waiting = false, stop = false;
    {
      const std::lock_guard lock(mutex_);
      try {
        if (stop_ && !idle()) throw PeerFailed(channel_->name_of(channel_->rank()) + " has left the group");
        if (!failure_) moved = move_all();
        if (!moved && !failure_) moved = check_ends();
      } catch (const std::exception& error) {
        channel_->break_off(error);
        channel_->await_readers();
        fail_all(std::current_exception());
      }
      waiting = !idle();
      stop = stop_;
    }
    if (!moved && !stop) Native::sleep(bell.count, seen, waiting ? milliseconds(100) : milliseconds(10'000));
    bell.sleepers.fetch_add(static_cast<uint32_t>(-1));
    if (stop && !waiting) return;
  }
}

// What no bell announces. Called when nothing moves: every 100 ms, or after a ring. Who has ended may have done its part
// before: only what does not move after the end was seen never will. True: something moved.
bool PostOffice::check_ends() {
  if (idle()) return false;
  if (channel_->is_broken()) channel_->throw_broken();
  const std::string dead = channel_->who_died();
  std::vector<bool> left(channel_->size());
  for (int peer = 0; peer < channel_->size(); ++peer) left[peer] = channel_->has_left(peer);
  if (move_all()) return true;
  if (!dead.empty()) channel_->fail(dead);
  const auto now = Clock::now();
  const auto check = [&](const Letter& letter) {
    const bool sends = letter->opType_ == c10d::OpType::SEND;
    const std::string peer = letter->peer_ < 0 ? "any rank" : channel_->name_of(letter->peer_);
    const auto what = [&] { return fmt::format("{} {}, tag {}", sends ? "send to" : "recv from", peer, letter->tag_); };
    if (now >= letter->deadline_) throw PeerFailed(fmt::format("timed out: {}: the other side did not come", what()));
    if (letter->peer_ >= 0 && left[letter->peer_]) throw PeerFailed(fmt::format("{}: it has left the group", what()));
  };
  for (const auto& letter : receives_) check(letter);
  for (const auto& letters : sends_) std::for_each(letters.begin(), letters.end(), check);
  for (const auto& arriving : arriving_) {
    if (arriving.letter) check(arriving.letter);
  }
  return false;
}

void PostOffice::fail_all(std::exception_ptr reason) {
  failure_ = reason;
  for (const auto& letter : receives_) letter->finish(reason);
  receives_.clear();
  for (auto& letters : sends_) {
    for (const auto& letter : letters) letter->finish(reason);
    letters.clear();
  }
  sends_left_ = 0;
  for (auto& arriving : arriving_) {
    if (arriving.letter) arriving.letter->finish(reason);
    arriving = {};
  }
}

bool PostOffice::move_all() {
  bool moved = deliver_set_aside();
  for (int peer = 0; peer < channel_->size(); ++peer) {
    if (peer == channel_->rank()) continue;
    moved = fill(peer) || moved;
    moved = empty(peer) || moved;
  }
  return moved;
}

bool PostOffice::fill(int to) {
  PairWords& pair = channel_->pair(channel_->rank(), to);
  bool moved = false;
  while (!sends_[to].empty()) {
    MailWork& letter = *sends_[to].front();
    const uint64_t filled = pair.filled.load(), emptied = pair.emptied.load();
    if (letter.read_when_emptied_ != 0 && emptied < letter.read_when_emptied_) break;
    if (letter.read_when_emptied_ == 0) {
      if (filled - emptied >= kChunksInFlight) break;
      std::byte* chunk = channel_->chunk(channel_->rank(), to, filled);
      auto& head = *reinterpret_cast<ChunkHead*>(chunk);
      const bool in_place = channel_->same_process(to) && letter.bytes_ > channel_->layout().chunk_data();
      head = {
          .message_bytes = letter.bytes_,
          .offset = letter.moved_,
          .bytes = std::min(letter.bytes_ - letter.moved_, in_place ? letter.bytes_ : channel_->layout().chunk_data()),
          .address = in_place ? reinterpret_cast<uint64_t>(letter.data_) : 0,
          .tag = letter.tag_};
      if (!in_place && head.bytes > 0)
        std::memcpy(chunk + Layout::chunk_head(), letter.data_ + letter.moved_, head.bytes);
      letter.moved_ += head.bytes;
      if (in_place) letter.read_when_emptied_ = filled + 1;
      pair.filled.store(filled + 1);
      channel_->words(to).doorbell.ring();
      moved = true;
      if (in_place || letter.moved_ < letter.bytes_) continue;
    }
    letter.finish(nullptr);
    sends_[to].pop_front();
    --sends_left_;
    moved = true;
  }
  return moved;
}

bool PostOffice::empty(int from) {
  PairWords& pair = channel_->pair(from, channel_->rank());
  bool moved = false;
  for (uint64_t emptied = pair.emptied.load(); emptied < pair.filled.load(); ++emptied) {
    const std::byte* chunk = channel_->chunk(from, channel_->rank(), emptied);
    const auto& head = *reinterpret_cast<const ChunkHead*>(chunk);
    if (head.offset == 0 && !arriving_[from].letter && !arriving_[from].aside && !begin_message(from, head)) break;
    take_chunk(from, head, chunk + Layout::chunk_head());
    pair.emptied.store(emptied + 1);
    channel_->words(from).doorbell.ring();
    moved = true;
  }
  return moved;
}

void PostOffice::require_fit(int from, size_t bytes, const MailWork& letter) const {
  if (letter.bytes_ == bytes) return;
  throw Disagreement(fmt::format("{} sends {} bytes with tag {} to {}, which wants {}", channel_->name_of(from), bytes,
                                 letter.tag_, channel_->name_of(channel_->rank()), letter.bytes_));
}

// Finds who takes the message. False: nobody wants anything from this rank, so it stays where it is.
bool PostOffice::begin_message(int from, const ChunkHead& head) {
  deliver_set_aside();  // nothing overtakes these
  const auto from_here = [&](const Letter& letter) { return letter->peer_ == from || letter->peer_ < 0; };
  const auto match = std::find_if(receives_.begin(), receives_.end(),
                                  [&](const Letter& letter) { return from_here(letter) && letter->tag_ == head.tag; });
  if (match != receives_.end()) {
    const Letter letter = *match;
    require_fit(from, head.message_bytes, *letter);
    letter->source_ = from;
    arriving_[from].letter = letter;
    receives_.erase(match);
    return true;
  }
  if (std::none_of(receives_.begin(), receives_.end(), from_here)) return false;
  arriving_[from].aside =
      std::make_shared<SetAside>(SetAside{from, head.tag, std::vector<std::byte>(head.message_bytes)});
  aside_.push_back(arriving_[from].aside);
  return true;
}

void PostOffice::take_chunk(int from, const ChunkHead& head, const std::byte* data) {
  Arriving& arriving = arriving_[from];
  std::byte* target = arriving.letter ? arriving.letter->data_ : arriving.aside->data.data();
  if (head.bytes > 0 && head.address != 0) {
    const Reading reading(*channel_);
    std::memcpy(target, reinterpret_cast<const void*>(head.address), head.bytes);
  } else if (head.bytes > 0) {
    std::memcpy(target + head.offset, data, head.bytes);
  }
  if (head.offset + head.bytes < head.message_bytes) return;
  if (arriving.letter) arriving.letter->finish(nullptr);
  if (arriving.aside) arriving.aside->whole = true;
  arriving = {};
}

bool PostOffice::deliver_set_aside() {
  bool moved = false;
  for (auto entry = aside_.begin(); entry != aside_.end();) {
    SetAside& message = **entry;
    const auto match = std::find_if(receives_.begin(), receives_.end(), [&](const Letter& letter) {
      return (letter->peer_ == message.from || letter->peer_ < 0) && letter->tag_ == message.tag;
    });
    if (!message.whole || match == receives_.end()) {
      ++entry;
      continue;
    }
    const Letter letter = *match;
    require_fit(message.from, message.data.size(), *letter);
    receives_.erase(match);
    std::copy(message.data.begin(), message.data.end(), letter->data_);
    letter->source_ = message.from;
    letter->finish(nullptr);
    entry = aside_.erase(entry);
    moved = true;
  }
  return moved;
}

}  // namespace tessera::comm::shm
