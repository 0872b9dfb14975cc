// Messages between two ranks of a group: send and recv. Messages match by sender and tag, in the order of the sends.
//
//   messages.add(c10::make_intrusive<MessageWork>(engine, c10d::OpType::SEND, 1, tag, tensor, timeout));
//   while (messages.move(ended)) ...       // moves a chunk of each message that can move
//
// Messages are sent in chunks through a ring for each ordered pair of ranks. Between threads of one process, a long
// message is copied directly from the sender's memory. Sends and receives wait only for their partner, so no order of
// messages of different ranks or tags can deadlock. A message that arrives before its receive, while a receive of
// another tag from that rank waits, is copied to a separate buffer ("set aside"). No function waits. Not thread-safe:
// used by the thread that drives the Engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>
#include <vector>

#include "tessera/comm/shm/channel.h"
#include "tessera/comm/shm/engine_work.h"

namespace tessera::comm::shm {

class MessageWork final : public EngineWork {
 public:
  // peer: the other rank; -1: receive from any rank.
  MessageWork(std::shared_ptr<Engine> engine, c10d::OpType type, int peer, int tag, const at::Tensor& tensor,
              std::chrono::milliseconds timeout);
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return {tensor_}; }

 private:
  friend class Messages;
  bool sends() const { return opType_ == c10d::OpType::SEND; }
  int peer_, tag_, source_ = -1;
  at::Tensor tensor_;
  std::byte* data_;
  size_t bytes_, moved_ = 0;
  uint64_t read_when_emptied_ = 0;  // not 0: read in place; the message has been read when Ring::emptied reaches this
};

class Messages {
 public:
  explicit Messages(Channel& channel);

  void add(c10::intrusive_ptr<MessageWork> message);
  bool is_idle() const { return receives_.empty() && sends_left_ == 0 && arriving_left_ == 0; }
  // Moves at most one chunk to and from each rank, and appends messages that have ended to `ended`. Returns whether
  // something moved. Throws Disagreement when a message does not have the size that its receiver expects.
  bool move(std::vector<EndedWork>& ended);
  // Throws when a message is past its deadline (TimedOut) or its peer has left (PeerFailed). `moving`: the engine still
  // moves data. Messages that have begun to move, and sends that wait behind such a send to the same peer, are then not
  // checked.
  void check(Clock::time_point now, const std::vector<bool>& left, bool moving) const;
  Clock::time_point deadline() const;  // earliest deadline of all messages
  void fail_all(const std::exception_ptr& reason, std::vector<EndedWork>& ended);

 private:
  using Message = c10::intrusive_ptr<MessageWork>;
  // A message that has arrived, or is arriving, without a matching receive.
  struct UnmatchedMessage {
    int from;
    int64_t tag;
    std::vector<std::byte> data;
    bool whole = false;  // all chunks have arrived
  };
  // The message whose chunks arrive next from one rank. `message` is the matching receive. If no receive matches,
  // `aside` is set instead, and the chunks are copied into its buffer.
  struct IncomingMessage {
    Message message;
    std::shared_ptr<UnmatchedMessage> aside;
    size_t read = 0;  // bytes read of a message that is read in place
  };

  bool advance_send(int to, std::vector<EndedWork>& ended);
  bool put_chunk(int to, MessageWork& message);
  bool advance_receive(int from, std::vector<EndedWork>& ended);
  bool begin_message(int from, const ChunkHead& head, std::vector<EndedWork>& ended);
  bool copy_chunk(int from, const ChunkHead& head, const std::byte* data);
  void end_message(int from, std::vector<EndedWork>& ended);
  bool deliver_unmatched(std::vector<EndedWork>& ended);
  void require_fit(int from, size_t bytes, const MessageWork& message) const;
  void check(const MessageWork& message, Clock::time_point now, const std::vector<bool>& left) const;

  Channel& channel_;
  std::vector<std::list<Message>> sends_;  // by destination
  size_t sends_left_ = 0, arriving_left_ = 0;
  std::list<Message> receives_;            // receives that match no arrived message yet
  std::vector<IncomingMessage> arriving_;  // by source
  std::list<std::shared_ptr<UnmatchedMessage>> unmatched_;
};

}  // namespace tessera::comm::shm
