// A rank's connection to the store of its run (hub_server.h), as c10d knows stores.
//
//   auto store = c10::make_intrusive<HubStore>(HubAddress{.host = "10.0.0.1", .port = 29500}, identity, 5min, server);
//
// c10d's own TCPStore asks nobody who he is, lists its keys to whoever comes, and its server without libuv looks at all
// connections for every request. One request at a time is under way: other threads wait. Thread-safe. Internal to comm.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "tessera/base/files/unique_fd.h"
#include "tessera/comm/rendezvous/hub_protocol.h"
#include "tessera/comm/rendezvous/hub_server.h"

namespace tessera::comm {

struct HubAddress {
  std::string host;
  int port = 0;
};

// Who was not let in, and by whom.
class HubRefusal final : public Error {
 public:
  HubRefusal(HubAnswer why, std::string run, std::string who)
      : Error(ErrorKind::kConfig, "[comm.store] refused by " + who),
        why(why),
        run(std::move(run)),
        who(std::move(who)) {}
  HubAnswer why;
  std::string run, who;  // of rank 0
};

class HubStore final : public c10d::Store {
 public:
  // `server`: kept alive, on the rank that has it. Tries until the timeout. Throws HubRefusal, and
  // c10::DistNetworkError when nobody answers or what answers is no store of this version.
  HubStore(HubAddress address, HubIdentity identity, std::chrono::milliseconds timeout,
           std::shared_ptr<HubServer> server = nullptr);

  // All throw what c10d's stores do: DistNetworkError when the connection has ended, DistStoreError after the timeout.
  c10::intrusive_ptr<Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }
  const std::shared_ptr<HubServer>& server() const { return server_; }  // null on the ranks that have none

 private:
  using Clock = std::chrono::steady_clock;
  bool greet(Clock::time_point deadline, std::string& reason);  // false: nobody there
  std::string ask(std::string frame);                           // the answer, without its length
  std::string await(HubOp op, const std::vector<std::string>& keys, std::chrono::milliseconds timeout);
  void send_all(std::string_view bytes, Clock::time_point deadline);
  // nullopt: not until the deadline.
  std::optional<std::string> receive(Clock::time_point deadline);

  const HubAddress address_;
  const HubIdentity identity_;
  const std::shared_ptr<HubServer> server_;
  std::mutex mutex_;  // of what follows
  UniqueFd socket_;
  std::string in_;
};

}  // namespace tessera::comm
