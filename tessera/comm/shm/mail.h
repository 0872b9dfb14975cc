// Messages between two ranks of a group: send and recv, matched by sender and tag, in the order of their sending.
//
//   auto work = c10::make_intrusive<MailWork>(...);
//   post_office.post(work);
//   work->wait();
//
// A thread, made at first need, moves every message that can move, so sends and receives wait for nobody but their
// partner: no order between messages of different ranks or tags can deadlock. A message that comes before its receive,
// while a receive for another tag waits, is set aside. Thread-safe.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "tessera/comm/shm/channel.h"

namespace tessera::comm::shm {

class PostOffice;

class MailWork final : public c10d::Work {
 public:
  // peer: -1 for a receive from anyone.
  MailWork(std::shared_ptr<PostOffice> office, c10d::OpType type, int peer, int tag, const at::Tensor& tensor,
           std::chrono::milliseconds timeout);
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  bool isSuccess() const override;
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return {tensor_}; }
  void abort() override;

 private:
  friend class PostOffice;
  std::shared_ptr<PostOffice> office_;
  int peer_, tag_, source_ = -1;
  at::Tensor tensor_;
  std::byte* data_;
  size_t bytes_, moved_ = 0;
  Clock::time_point deadline_;
  uint64_t read_when_emptied_ = 0;  // of a message that is read in place: the chunk count that says so
};

class PostOffice {
 public:
  explicit PostOffice(std::shared_ptr<Channel> channel);
  ~PostOffice();
  PostOffice(const PostOffice&) = delete;
  PostOffice& operator=(const PostOffice&) = delete;

  void post(const c10::intrusive_ptr<MailWork>& work);
  Channel& channel() { return *channel_; }
  void shut_down();  // ends the thread; what is unfinished fails

 private:
  using Letter = c10::intrusive_ptr<MailWork>;
  // A message that nobody waits for yet.
  struct SetAside {
    int from;
    int64_t tag;
    std::vector<std::byte> data;
    bool whole = false;
  };
  // What the next chunks from a rank belong to.
  struct Arriving {
    Letter letter;
    std::shared_ptr<SetAside> aside;
  };

  void work();
  bool move_all();
  bool fill(int to);
  bool empty(int from);
  bool begin_message(int from, const ChunkHead& head);
  void take_chunk(int from, const ChunkHead& head, const std::byte* data);
  bool deliver_set_aside();
  bool check_ends();
  // Disagreement when the message from a rank is not of the size that its receiver wants.
  void require_fit(int from, size_t bytes, const MailWork& letter) const;
  void fail_all(std::exception_ptr reason);
  bool idle() const { return receives_.empty() && sends_left_ == 0 && arriving_letters() == 0; }
  size_t arriving_letters() const;

  std::shared_ptr<Channel> channel_;
  std::mutex mutex_;
  std::vector<std::list<Letter>> sends_;  // by destination
  size_t sends_left_ = 0;
  std::list<Letter> receives_;      // those without a message yet
  std::vector<Arriving> arriving_;  // by source
  std::list<std::shared_ptr<SetAside>> aside_;
  std::exception_ptr failure_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm::shm
