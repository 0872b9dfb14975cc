#include "tessera/serve/connections.h"

#include <sys/socket.h>

#include <algorithm>

namespace tessera::serve {

Connections::Connections(double read_seconds, double answer_seconds)
    : read_time_(read_seconds), answer_time_(answer_seconds), thread_([this] { watch(); }) {}

Connections::~Connections() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Connections::opened(const void* key, int socket) {
  const std::lock_guard lock(mutex_);
  open_[key] = {.socket = socket, .since = Clock::now()};
}

void Connections::answering(const void* key) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(key);
  if (found == open_.end()) return;
  found->second.answering = true;
  found->second.since = Clock::now();
}

void Connections::waiting(const void* key) {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(key);
  if (found == open_.end()) return;
  found->second.answering = false;
  found->second.since = Clock::now();
}

void Connections::closed(const void* key) {
  const std::lock_guard lock(mutex_);
  open_.erase(key);
}

int64_t Connections::being_answered() const {
  const std::lock_guard lock(mutex_);
  return std::count_if(open_.begin(), open_.end(), [](const auto& entry) { return entry.second.answering; });
}

void Connections::watch() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, std::chrono::milliseconds(500), [this] { return ending_; })) {
    for (auto& [key, connection] : open_) {
      // Its own thread closes it.
      if (Clock::now() - connection.since > (connection.answering ? answer_time_ : read_time_))
        ::shutdown(connection.socket, SHUT_RDWR);
    }
  }
}

}  // namespace tessera::serve
