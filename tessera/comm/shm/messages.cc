#include "tessera/comm/shm/messages.h"

#include <algorithm>

#include "tessera/base/files/copy_bytes.h"

namespace tessera::comm::shm {
namespace {

constexpr size_t kInPlaceStepBytes = 1024 * 1024;  // bytes read in place in one step

}  // namespace

MessageWork::MessageWork(std::shared_ptr<Engine> engine, c10d::OpType type, int peer, int tag, const at::Tensor& tensor,
                         std::chrono::milliseconds timeout)
    : EngineWork(std::move(engine), type, timeout),
      peer_(peer),
      tag_(tag),
      tensor_(tensor),
      data_(static_cast<std::byte*>(type == c10d::OpType::SEND ? const_cast<void*>(tensor.const_data_ptr())
                                                               : tensor.mutable_data_ptr())),
      bytes_(tensor.nbytes()) {}

Messages::Messages(Channel& channel) : channel_(channel), sends_(channel.size()), arriving_(channel.size()) {}

void Messages::add(Message message) {
  if (!message->sends()) return receives_.push_back(std::move(message));
  sends_[message->peer_].push_back(std::move(message));
  ++sends_left_;
}

Clock::time_point Messages::deadline() const {
  auto first = Clock::time_point::max();
  const auto look = [&](const Message& message) { first = std::min(first, message->deadline()); };
  std::ranges::for_each(receives_, look);
  for (const auto& messages : sends_) std::ranges::for_each(messages, look);
  for (const auto& arriving : arriving_) {
    if (arriving.message) look(arriving.message);
  }
  return first;
}

void Messages::check(const MessageWork& message, Clock::time_point now, const std::vector<bool>& left) const {
  const auto what = [&] {
    return fmt::format("{} {}, tag {}", message.sends() ? "send to" : "recv from",
                       message.peer_ < 0 ? "any rank" : channel_.name_of(message.peer_), message.tag_);
  };
  if (now >= message.deadline()) throw TimedOut(fmt::format("timed out: {}: the other rank did not take part", what()));
  if (message.peer_ >= 0 && left[message.peer_]) throw PeerFailed(fmt::format("{}: it has left the group", what()));
}

void Messages::check(Clock::time_point now, const std::vector<bool>& left, bool moving) const {
  for (const auto& message : receives_) check(*message, now, left);
  for (const auto& messages : sends_) {
    if (moving && !messages.empty() && messages.front()->moved_ > 0) continue;
    for (const auto& message : messages) check(*message, now, left);
  }
  if (moving) return;
  for (const auto& arriving : arriving_) {
    if (arriving.message) check(*arriving.message, now, left);
  }
}

// Fails all sends and receives. Messages that were set aside stay in unmatched_: no receive has matched them yet, so no
// work could fail for them.
void Messages::fail_all(const std::exception_ptr& reason, std::vector<EndedWork>& ended) {
  const auto fail = [&](const Message& message) { ended.push_back({message, reason}); };
  std::ranges::for_each(receives_, fail);
  receives_.clear();
  for (auto& messages : sends_) {
    std::ranges::for_each(messages, fail);
    messages.clear();
  }
  for (auto& arriving : arriving_) {
    if (arriving.message) fail(arriving.message);
    arriving = {};
  }
  sends_left_ = arriving_left_ = 0;
}

bool Messages::move(std::vector<EndedWork>& ended) {
  bool moved = deliver_unmatched(ended);
  for (int peer = 0; peer < channel_.size(); ++peer) {
    if (peer == channel_.rank()) continue;
    moved = advance_send(peer, ended) || moved;
    moved = advance_receive(peer, ended) || moved;
  }
  return moved;
}

// Advances the first of the unfinished sends to rank `to`. A send ends when the caller may reuse the memory of the
// message. A message that is sent in chunks ends when its last chunk is in the ring. A message that is read in place is
// one chunk that holds only the message's address; its send ends when the receiver has copied the message and removed
// this chunk from the ring.
bool Messages::advance_send(int to, std::vector<EndedWork>& ended) {
  if (sends_[to].empty()) return false;
  MessageWork& message = *sends_[to].front();
  const bool shown = message.read_when_emptied_ != 0;
  if (shown && channel_.ring(channel_.rank(), to).emptied.load() < message.read_when_emptied_) return false;
  if (!shown && !put_chunk(to, message)) return false;
  if (!shown && (message.read_when_emptied_ != 0 || message.moved_ < message.bytes_)) return true;
  ended.push_back({sends_[to].front(), nullptr});
  sends_[to].pop_front();
  --sends_left_;
  return true;
}

// Puts the next chunk into the ring; returns false when the ring is full. A message that is longer than a chunk and
// goes to a thread of this process is sent as one chunk, which only holds the address of the message.
bool Messages::put_chunk(int to, MessageWork& message) {
  Ring<Native>& ring = channel_.ring(channel_.rank(), to);
  if (!ring.has_room()) return false;
  const uint64_t filled = ring.filled.load();
  const size_t fits = channel_.layout().chunk_data();
  std::byte* chunk = channel_.chunk(channel_.rank(), to, filled);
  auto& head = *reinterpret_cast<ChunkHead*>(chunk);
  const bool in_place = channel_.same_process(to) && message.bytes_ > fits;
  head = {.message_bytes = message.bytes_,
          .offset = message.moved_,
          .bytes = in_place ? message.bytes_ : std::min(message.bytes_ - message.moved_, fits),
          .address = in_place ? reinterpret_cast<uint64_t>(message.data_) : 0,
          .tag = message.tag_};
  if (!in_place && head.bytes > 0) copy_bytes(chunk + Layout::chunk_head(), message.data_ + message.moved_, head.bytes);
  message.moved_ += head.bytes;
  if (in_place) message.read_when_emptied_ = filled + 1;
  ring.put(channel_.bells(to));
  return true;
}

// Takes a chunk from a rank. The chunk is removed from the ring only when all its bytes have been copied.
bool Messages::advance_receive(int from, std::vector<EndedWork>& ended) {
  Ring<Native>& ring = channel_.ring(from, channel_.rank());
  if (!ring.has_chunk()) return false;
  const std::byte* chunk = channel_.chunk(from, channel_.rank(), ring.emptied.load());
  const ChunkHead head = *reinterpret_cast<const ChunkHead*>(chunk);
  IncomingMessage& arriving = arriving_[from];
  if (!arriving.message && !arriving.aside && !begin_message(from, head, ended)) return false;
  if (!copy_chunk(from, head, chunk + Layout::chunk_head())) return true;
  ring.take(channel_.bells(from));
  if (head.offset + head.bytes == head.message_bytes) end_message(from, ended);
  return true;
}

void Messages::require_fit(int from, size_t bytes, const MessageWork& message) const {
  if (message.bytes_ == bytes) return;
  throw Disagreement(fmt::format("{} sends {} bytes with tag {} to {}, which wants {}", channel_.name_of(from), bytes,
                                 message.tag_, channel_.name_of(channel_.rank()), message.bytes_));
}

// Finds the receive for a new message. Without a match the message is set aside if another receive from the same sender
// waits: that receive may match a message behind this one in the ring. Otherwise returns false and the message stays in
// the ring, which stops the sender when the ring is full.
bool Messages::begin_message(int from, const ChunkHead& head, std::vector<EndedWork>& ended) {
  deliver_unmatched(ended);  // first: a message must not overtake an earlier one of the same tag
  const auto from_here = [&](const Message& message) { return message->peer_ == from || message->peer_ < 0; };
  const auto match = std::ranges::find_if(
      receives_, [&](const Message& message) { return from_here(message) && message->tag_ == head.tag; });
  if (match != receives_.end()) {
    require_fit(from, head.message_bytes, **match);
    (*match)->source_ = from;
    arriving_[from].message = *match;
    ++arriving_left_;
    receives_.erase(match);
    return true;
  }
  if (std::ranges::none_of(receives_, from_here)) return false;
  arriving_[from].aside =
      std::make_shared<UnmatchedMessage>(UnmatchedMessage{from, head.tag, std::vector<std::byte>(head.message_bytes)});
  unmatched_.push_back(arriving_[from].aside);
  return true;
}

// Copies the chunk that `head` describes from rank `from` into the message that is arriving. If head.address is set,
// the chunk is read at this address in the sender's memory, and one call copies at most 1 MiB. Otherwise `data` holds
// the chunk. Returns whether the whole chunk has been copied.
bool Messages::copy_chunk(int from, const ChunkHead& head, const std::byte* data) {
  IncomingMessage& arriving = arriving_[from];
  std::byte* target = arriving.message ? arriving.message->data_ : arriving.aside->data.data();
  if (head.address == 0) {
    copy_bytes(target + head.offset, data, head.bytes);
    return true;
  }
  const size_t bytes = std::min<size_t>(head.bytes - arriving.read, kInPlaceStepBytes);
  InPlaceRead reading(channel_);
  copy_bytes(target + arriving.read, reinterpret_cast<const std::byte*>(head.address) + arriving.read, bytes);
  reading.end();
  arriving.read += bytes;
  return arriving.read == head.bytes;
}

void Messages::end_message(int from, std::vector<EndedWork>& ended) {
  IncomingMessage& arriving = arriving_[from];
  if (arriving.aside) arriving.aside->whole = true;
  if (arriving.message) {
    --arriving_left_;
    ended.push_back({arriving.message, nullptr});
  }
  arriving = {};
}

// Copies complete messages of `unmatched_` to the receives that match them, in the order in which the messages arrived.
// Returns whether a message was copied.
bool Messages::deliver_unmatched(std::vector<EndedWork>& ended) {
  bool moved = false;
  for (auto entry = unmatched_.begin(); entry != unmatched_.end();) {
    UnmatchedMessage& aside = **entry;
    const auto match = std::ranges::find_if(receives_, [&](const Message& message) {
      return (message->peer_ == aside.from || message->peer_ < 0) && message->tag_ == aside.tag;
    });
    if (!aside.whole || match == receives_.end()) {
      ++entry;
      continue;
    }
    const Message message = *match;
    require_fit(aside.from, aside.data.size(), *message);
    receives_.erase(match);
    std::copy(aside.data.begin(), aside.data.end(), message->data_);
    message->source_ = aside.from;
    ended.push_back({message, nullptr});
    entry = unmatched_.erase(entry);
    moved = true;
  }
  return moved;
}

}  // namespace tessera::comm::shm
