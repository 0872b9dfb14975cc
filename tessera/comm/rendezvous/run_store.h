// The client of the store of a run (run_store_server.h), as a c10d::Store.
//
//   const RunStoreAddress address{.host = "10.0.0.1", .port = 29500};
//   auto store = c10::make_intrusive<RunStore>(address, identity, 5min, server);
//
// c10d's TCPStore is not used because it has no authentication, lists its keys to any client, and its server without
// libuv scans all connections for every request. A RunStore sends one request at a time; other threads wait.
// Thread-safe. Internal to comm.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "tessera/base/files/unique_fd.h"
#include "tessera/comm/rendezvous/run_store_protocol.h"
#include "tessera/comm/rendezvous/run_store_server.h"

namespace tessera::comm {

struct RunStoreAddress {
  std::string host;
  int port = 0;
};

// The Error (kConfig) that the server of a run's store refused the connection, because the client has a wrong token or
// names another run.
class RunStoreRefusal final : public Error {
 public:
  RunStoreRefusal(RunStoreAnswer why, std::string run, std::string who)
      : Error(ErrorKind::kConfig, "[comm.store] refused by " + who),
        why(why),
        run(std::move(run)),
        who(std::move(who)) {}
  RunStoreAnswer why;
  std::string run, who;  // the server's run, and who serves it; "" and "rank 0" after a wrong token
};

class RunStore final : public c10d::Store {
 public:
  // Connects to the store's server; tries again until the timeout. `server` is this server on the rank that runs it,
  // null on other ranks; the RunStore keeps the server alive. Throws RunStoreRefusal when the server refuses the
  // connection, because of the token or the name of the run; c10::DistNetworkError when there is no answer until the
  // timeout, or when the peer is no store of this version.
  RunStore(RunStoreAddress address, RunIdentity identity, std::chrono::milliseconds timeout,
           std::shared_ptr<RunStoreServer> server = nullptr);

  // These functions throw the same errors as c10d's stores: DistNetworkError when the connection has ended,
  // DistStoreError after the timeout.
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
  const std::shared_ptr<RunStoreServer>& server() const {
    return server_;
  }  // null on the ranks that do not serve the store

 private:
  using Clock = std::chrono::steady_clock;
  // Connects to the server of the store, sends the request kHello and waits for the answer. Returns true when the
  // server accepts this client; returns false and sets `reason` when no server answers. Throws RunStoreRefusal when the
  // server refuses this client.
  bool try_connect(Clock::time_point deadline, std::string& reason);
  // Sends a request that is answered at once; returns the answer without its length.
  std::string ask(std::string frame);
  // Sends a kGet or kWait, and cancels it after the timeout.
  std::string await(RunStoreRequest op, const std::vector<std::string>& keys, std::chrono::milliseconds timeout);
  void send_all(std::string_view bytes, Clock::time_point deadline);
  // Returns the next frame without its length; nullopt at the deadline.
  std::optional<std::string> receive(Clock::time_point deadline);

  const RunStoreAddress address_;
  const RunIdentity identity_;
  const std::shared_ptr<RunStoreServer> server_;
  std::mutex mutex_;  // held for a request and its answer; guards the members below
  UniqueFd socket_;   // closed after an answer was missed
  std::string in_;    // received bytes that are not a whole frame yet
};

}  // namespace tessera::comm
