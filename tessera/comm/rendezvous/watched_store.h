// The store of a group while the group is made. Its waits end with an error when a rank has failed: a killed rank never
// sets the key that the others wait for.
//
//   auto store = c10::make_intrusive<WatchedStore>("group/dp", world_store, monitor);
//
// As thread-safe as the wrapped store. Internal to comm.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

namespace tessera::comm {

class Monitor;

class WatchedStore final : public c10d::PrefixStore {
 public:
  WatchedStore(std::string prefix, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Monitor> monitor)
      : PrefixStore(std::move(prefix), std::move(store)), monitor_(std::move(monitor)) {}

  // These functions throw the errors of the wrapped store, the error of the failed rank (FailureReport in
  // failure_reporter.h) once it is known, and Error kComm after the timeout.
  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  std::shared_ptr<Monitor> monitor_;
};

}  // namespace tessera::comm
