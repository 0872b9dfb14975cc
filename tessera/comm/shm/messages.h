// Messages between two ranks of a group: send and recv, matched by sender and tag, in the order of their sending.
//
//   messages.add(c10::make_intrusive<MessageWork>(engine, c10d::OpType::SEND, 1, tag, tensor, timeout));
//   while (messages.move(ended)) ...       // a chunk of each that can move
//
// They go in chunks through a ring from each rank to each other one; what threads of one process send is copied from
// where it lies. Sends and receives wait for nobody but their partner: no order between messages of different ranks or
// tags can deadlock. A message that comes before its receive, while a receive for another tag waits, is set aside.
// Never waits. Not thread-safe: used by whoever drives the Engine.
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
  // peer: -1 for a receive from anyone.
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
  uint64_t read_when_emptied_ = 0;  // of a message that is read in place: the chunk count that says so
};

class Messages {
 public:
  explicit Messages(Channel& channel);

  void add(c10::intrusive_ptr<MessageWork> message);
  bool is_idle() const { return receives_.empty() && sends_left_ == 0 && arriving_left_ == 0; }
  // At most a chunk to and from each rank; what ends goes to `ended`. True: something moved. Throws Disagreement when a
  // message is not of the size that its receiver wants.
  bool move(std::vector<Ended>& ended);
  // Throws when a message will never move, for it is late or its peer has left. moving: others go on, so those that
  // have begun may too.
  void check(Clock::time_point now, const std::vector<bool>& left, bool moving) const;
  Clock::time_point deadline() const;  // the first one
  void fail_all(const std::exception_ptr& reason, std::vector<Ended>& ended);

 private:
  using Message = c10::intrusive_ptr<MessageWork>;
  // One that nobody waits for yet.
  struct SetAside {
    int from;
    int64_t tag;
    std::vector<std::byte> data;
    bool whole = false;
  };
  // What the next chunks from a rank belong to.
  struct Arriving {
    Message message;
    std::shared_ptr<SetAside> aside;
    size_t read = 0;  // of a message that is read in place
  };

  bool fill(int to, std::vector<Ended>& ended);
  bool put_chunk(int to, MessageWork& message);
  bool empty(int from, std::vector<Ended>& ended);
  bool begin_message(int from, const ChunkHead& head, std::vector<Ended>& ended);
  bool take_chunk(int from, const ChunkHead& head, const std::byte* data);
  void end_message(int from, std::vector<Ended>& ended);
  bool deliver_set_aside(std::vector<Ended>& ended);
  void require_fit(int from, size_t bytes, const MessageWork& message) const;
  void check(const MessageWork& message, Clock::time_point now, const std::vector<bool>& left) const;

  Channel& channel_;
  std::vector<std::list<Message>> sends_;  // by destination
  size_t sends_left_ = 0, arriving_left_ = 0;
  std::list<Message> receives_;     // those without a message yet
  std::vector<Arriving> arriving_;  // by source
  std::list<std::shared_ptr<SetAside>> aside_;
};

}  // namespace tessera::comm::shm
