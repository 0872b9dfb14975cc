// How long clients take: connections that have not sent a whole request in time are shut, and those that have not taken
// the whole answer.
//
//   Connections connections(30.0, 630.0);
//   connections.opened(key, socket); connections.answering(key); connections.waiting(key); connections.closed(key);
//
// Thread-safe; looks once in half a second on a thread of its own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

namespace tessera::serve {

class Connections {
 public:
  // For a request to arrive, and for its answer from then on to be made and read.
  Connections(double read_seconds, double answer_seconds);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  void opened(const void* key, int socket);
  void answering(const void* key);  // a whole request is here
  void waiting(const void* key);    // for the next one
  void closed(const void* key);
  int64_t being_answered() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    int socket = -1;
    bool answering = false;
    Clock::time_point since{};
  };
  void watch();

  const std::chrono::duration<double> read_time_, answer_time_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::map<const void*, Connection> open_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace tessera::serve
