// The rendezvous: meet() opens the store, checks that all ranks are of one run, waits for every rank, and distributes
// what rank 0 computed from their records.
//
// Keys of the store, in the order in which they are written:
//   seat/R      counter; the process that makes it 1 is rank R
//   arrived/R   the RankRecord of rank R
//   dissent     an error found by a second process that claims to be rank R
//   place/R     the RankPosition of rank R, written by rank 0
//   verdict     by rank 0: "ok" and the HostSummary, or an error: six characters for its kind and its message
//   heard       counter of the ranks that have read an error
#include <unistd.h>

#include <future>
#include <nlohmann/json.hpp>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/machine/host.h"
#include "tessera/base/machine/listen.h"
#include "tessera/base/text/json.h"
#include "tessera/comm/backends/interface_choice.h"
#include "tessera/comm/rendezvous/rank_records.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/comm/rendezvous/run_store.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kDissentPollInterval{500};  // interval between checks of key "dissent"
constexpr milliseconds kPatience{10000};           // time for a previous run at the same address to end

// Opens the listener of the store. Tessera listens itself because c10d's socket would listen on every interface.
ListeningSocket listen_for_ranks(const RendezvousPoint& point) {
  const bool one_host = point.info.local_size == point.info.size;
  try {
    ListeningSocket here =
        listen_at(point.host, point.port, one_host ? ListenScope::kThisHost : ListenScope::kOtherHosts);
    // The listening socket of the store is not bound to the interface of GLOO_SOCKET_IFNAME: other hosts resolve the
    // name of rank 0's host themselves, and rank 0 does not know which of its addresses they find.
    if (here.on_all_interfaces) {
      log_info("[comm.rendezvous] {} is loopback or no address here: the store listens on every interface, port {}",
               point.host, point.port);
    }
    return here;
  } catch (const Error& error) {
    const std::string what = error.what();
    throw Error(
        error.kind(),
        "[comm.rendezvous]" + what.substr(what.find(' ')) +
            (error.kind() == ErrorKind::kComm ? ". Choose another one: --master HOST:PORT or MASTER_PORT." : ""));
  }
}

RankRecord describe_this_rank(const RendezvousPoint& point) {
  const WorldInfo& info = point.info;
  return {.rank = info.rank,
          .size = info.size,
          .local_rank = info.local_rank,
          .local_size = info.local_size,
          .pid = ::getpid(),
          .host_name = host_name(),
          .host = host_identity(),
          .cores = core_mask(),
          .address = !point.folder.empty()          ? ""
                     : info.local_size == info.size ? address_towards(point.host)
                                                    : own_address(point.host)};
}

// The Error (kConfig) that the store at the rendezvous address belongs to another run.
class OtherRunError final : public Error {
 public:
  explicit OtherRunError(const std::string& message) : Error(ErrorKind::kConfig, message) {}
};

[[noreturn]] void throw_other_run(const RendezvousPoint& point, const RankRecord& self, const std::string& run,
                                  const std::string& who) {
  throw OtherRunError(fmt::format(
      "[comm.rendezvous] two runs at {}: this is {} of run '{}', there is {} of run '{}'. Give each run its own port; "
      "if this is one run, start all its hosts with the same --run-id or TESSERA_RUN_ID.",
      point.place(), self.who(), point.run, who, run));
}

[[noreturn]] void throw_other_token(const RendezvousPoint& point, const RankRecord& self, const std::string& who) {
  throw OtherRunError(fmt::format(
      "[comm.rendezvous] {} at {} has another TESSERA_TOKEN than this, {}. Set the same token on all hosts.", who,
      point.place(), self.who()));
}

// Connects to torchrun's store. c10d's client waits without a limit when another program listens there and sends
// nothing, so the client is made on a thread of its own, which is abandoned after the timeout.
c10::intrusive_ptr<c10d::Store> connect_torchrun_store(const RendezvousPoint& point, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(point.port);
  options.waitWorkers = false;
  options.timeout = timeout;
  const auto result = std::make_shared<std::promise<c10::intrusive_ptr<c10d::Store>>>();
  auto future = result->get_future();
  std::thread([result, host = point.host, options] {
    try {
      result->set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      result->set_exception(std::current_exception());
    }
  }).detach();
  if (future.wait_for(options.timeout + std::chrono::seconds(2)) != std::future_status::ready) {
    throw std::runtime_error("the process that listens there does not answer");
  }
  return future.get();
}

RunIdentity identity_of(const RendezvousPoint& point, const RankRecord& self) {
  return {.token = point.token, .run = point.run, .who = self.who()};
}

c10::intrusive_ptr<c10d::Store> open_store(const RendezvousPoint& point, const RankRecord& self, milliseconds timeout) {
  const WorldInfo& info = point.info;
  if (!point.folder.empty()) return c10::make_intrusive<c10d::FileStore>(point.folder + "/store", info.size);
  try {
    if (point.is_torchrun_store) return connect_torchrun_store(point, timeout);
    std::shared_ptr<RunStoreServer> server;
    RunStoreAddress address{.host = point.host, .port = point.port};
    if (point.serve) {
      ListeningSocket here = listen_for_ranks(point);
      address.host = here.address;  // the name may resolve to a forwarding service that is not reachable from here
      server = std::make_shared<RunStoreServer>(std::move(here.socket), identity_of(point, self));
    }
    return c10::make_intrusive<RunStore>(address, identity_of(point, self), timeout, server);
  } catch (const RunStoreRefusal& refusal) {
    if (refusal.why == RunStoreAnswer::kWrongRun) throw_other_run(point, self, refusal.run, refusal.who);
    throw_other_token(point, self, refusal.who);
  } catch (const std::exception& error) {
    const auto* own = dynamic_cast<const Error*>(&error);
    if (own && point.serve) throw;
    raise(ErrorKind::kComm,
          "[comm.rendezvous] rank {} of {} found no store at {} within {} s ({}). Is rank 0 running there?", info.rank,
          info.size, point.place(), timeout.count() / 1000, first_line(error));
  }
}

// Waits for a key; returns false at the deadline.
bool wait_for(c10d::Store& store, const std::string& key, Clock::time_point deadline) {
  if (store.check({key})) return true;
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
  if (left <= milliseconds(0)) return false;
  try {
    store.wait({key}, left);
    return true;
  } catch (const c10::Error&) {
    return store.check({key});
  }
}

std::string record_key(int rank) { return fmt::format("arrived/{}", rank); }
std::string position_key(int rank) { return fmt::format("place/{}", rank); }

struct RunName {
  std::string run, who;
};

// Parses the value of the store's key "name". Returns an empty RunName if `text` was written by another program or by
// an earlier version of Tessera.
RunName parse_run_name(const std::string& text) {
  try {
    const Json json = parse_json_object(text, "name", {.max_bytes = size_t{1} << 16, .max_depth = 1, .max_keys = 16});
    const JsonReader fields(json, "name");
    return {.run = fields.string("run", ""), .who = fields.string("who", "")};
  } catch (const Error&) {
    return {};
  }
}

// Checks the run's name and the token in a store without authentication (file store, torchrun's store), before this
// rank writes anything. Rank 0 publishes the run's name under "name" and sets "known" under a prefix that contains the
// token. Another rank compares the run's name and finds "known" only if it has the same token. The returned store has
// that prefix.
c10::intrusive_ptr<c10d::Store> check_run_and_token(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const RendezvousPoint& point, const RankRecord& self,
                                                    Clock::time_point deadline, milliseconds timeout) {
  auto own = c10::make_intrusive<c10d::PrefixStore>("run/" + point.token, store);
  if (self.rank == 0) {
    own->set("known", "yes");
    store->set("name", nlohmann::json{{"run", point.run}, {"who", self.who()}}.dump());
    return own;
  }
  TESSERA_CHECK(wait_for(*store, "name", deadline + std::chrono::seconds(2)), ErrorKind::kComm,
                "[comm.rendezvous] rank 0 of {} did not arrive within {} s at {}", self.size, timeout.count() / 1000,
                point.place());
  const auto [run, who] = parse_run_name(store->get_to_str("name"));
  if (run != point.run && !run.empty() && !point.run.empty()) throw_other_run(point, self, run, who);
  if (!own->check({"known"})) throw_other_token(point, self, who);
  return own;
}

// Opens the store of this run. A previous run at this address may still be ending, so a store of another run is an
// error only after kPatience.
c10::intrusive_ptr<c10d::Store> open_run_store(const RendezvousPoint& point, const RankRecord& self,
                                               Clock::time_point deadline, milliseconds timeout) {
  const auto patience = Clock::now() + std::min(timeout / 2, kPatience);
  for (;;) {
    try {
      const auto store =
          c10::make_intrusive<c10d::PrefixStore>("tessera/" + point.prefix, open_store(point, self, timeout));
      if (point.folder.empty() && !point.is_torchrun_store) return store;  // the hello was checked
      return check_run_and_token(store, point, self, deadline, timeout);
    } catch (const OtherRunError&) {
      if (Clock::now() >= patience) throw;
    } catch (const c10::Error&) {  // the store ended meanwhile
      if (Clock::now() >= patience) throw;
    }
    std::this_thread::sleep_for(kDissentPollInterval);
  }
}

// Registers this process as its rank. When two processes claim one rank, the second one throws. If their world sizes
// differ, their launchers were started with different numbers, and the second process also sets "dissent" so that rank
// 0 gives this error to all ranks.
void claim_rank(c10d::Store& store, const RendezvousPoint& point, const RankRecord& self) {
  if (store.add(fmt::format("seat/{}", self.rank), 1) == 1) {
    store.set(record_key(self.rank), self.text());
    return;
  }
  std::string other = "another process";
  if (wait_for(store, record_key(self.rank), Clock::now() + std::chrono::seconds(2))) {
    const RankRecord seated = RankRecord::parse(store.get_to_str(record_key(self.rank)));
    other = seated.who();
    if (seated.size != self.size) {
      const std::string dissent = sizes_differ(seated, self);
      store.set("dissent", dissent);
      throw Error(ErrorKind::kConfig, dissent);
    }
  }
  raise(ErrorKind::kConfig, "[comm.rendezvous] two processes say that they are rank {} of {} at {}: {}, and this, {}",
        self.rank, self.size, point.place(), other, self.who());
}

// Waits until the store has the record of `rank`; returns false at the deadline. If the store's key "dissent" is set
// before the record arrives, throws Error kConfig with the value of the key as its message.
bool wait_for_rank_record(c10d::Store& store, int rank, Clock::time_point deadline) {
  for (;;) {
    if (wait_for(store, record_key(rank), std::min(deadline, Clock::now() + kDissentPollInterval))) return true;
    if (store.check({"dissent"})) throw Error(ErrorKind::kConfig, store.get_to_str("dissent"));
    if (Clock::now() >= deadline) return false;
  }
}

// Rank 0: waits for the record of every rank, writes each rank's position, and returns the text of "verdict": "ok" and
// the hosts, or the error that all ranks will throw.
std::string decide_rendezvous(c10d::Store& store, const RendezvousPoint& point, Clock::time_point deadline,
                              milliseconds timeout) {
  std::vector<RankRecord> records;
  std::string missing;
  try {
    for (int rank = 0; rank < point.info.size; ++rank) {
      if (wait_for_rank_record(store, rank, deadline)) {
        records.push_back(RankRecord::parse(store.get_to_str(record_key(rank))));
        if (records.back().size != point.info.size) {
          throw Error(ErrorKind::kConfig, sizes_differ(records.front(), records.back()));
        }
      } else {
        missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      }
    }
    if (missing.empty()) {
      const RendezvousResult agreed = agree(records);
      for (const RankRecord& one : records) store.set(position_key(one.rank), agreed.positions.at(one.rank).text());
      return "ok" + text_of_hosts(agreed.hosts);
    }
  } catch (const Error& error) {
    return (error.kind() == ErrorKind::kConfig ? "config" : "comm  ") + std::string(error.what());
  }
  return fmt::format("comm  [comm.rendezvous] rank {} of {} did not arrive within {} s at {}", missing, point.info.size,
                     timeout.count() / 1000, point.place());
}

// After an error: rank 0, whose process runs the store, waits until the other ranks have read the error, 2 s at most.
void wait_until_error_read(c10d::Store& store, const WorldInfo& info) {
  if (info.rank > 0) {
    store.add("heard", 1);
    return;
  }
  int64_t present = 0;
  for (int rank = 1; rank < info.size; ++rank) present += store.check({record_key(rank)}) ? 1 : 0;
  const auto deadline = Clock::now() + std::chrono::seconds(2);
  while (store.add("heard", 0) < present && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(10));
}

// Returns the text of "verdict", which rank 0 writes once all ranks have arrived or the time is over. Other ranks wait
// 2 s longer, so that they receive rank 0's message instead of a time-out of their own.
std::string read_rendezvous_result(c10d::Store& store, const RendezvousPoint& point, Clock::time_point deadline,
                                   milliseconds timeout) {
  const WorldInfo& info = point.info;
  if (info.rank == 0) {
    store.set("verdict", decide_rendezvous(store, point, deadline, timeout));
  } else {
    TESSERA_CHECK(wait_for(store, "verdict", deadline + std::chrono::seconds(2)), ErrorKind::kComm,
                  "[comm.rendezvous] rank 0 of {} did not arrive within {} s at {}", info.size, timeout.count() / 1000,
                  point.place());
  }
  std::string result = store.get_to_str("verdict");
  if (!result.starts_with("ok")) wait_until_error_read(store, info);
  return result;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> meet(RendezvousPoint& point, milliseconds timeout) {
  WorldInfo& info = point.info;
  if (info.size == 1) {
    info.local_size = 1;
    info.local_rank = 0;
    return c10::make_intrusive<c10d::HashStore>();
  }
  const auto deadline = Clock::now() + timeout;
  c10::intrusive_ptr<c10d::Store> store;
  std::string result;
  try {
    const RankRecord self = describe_this_rank(point);
    store = open_run_store(point, self, deadline, timeout);
    claim_rank(*store, point, self);
    result = read_rendezvous_result(*store, point, deadline, timeout);
    if (result.starts_with("ok")) {
      info.hosts = hosts_of_text(result.substr(2));
      const RankPosition position = RankPosition::parse(store->get_to_str(position_key(info.rank)));
      info.local_rank = position.local_rank;
      info.local_size = position.local_size;
      info.cores_per_rank = position.cores_per_rank;
      point.other_host = position.other_host.empty() ? point.host : position.other_host;
    }
  } catch (const c10::Error& error) {
    raise(ErrorKind::kComm, "[comm.rendezvous] rank {} of {} lost the store at {}: {}. Did rank 0 end?", info.rank,
          info.size, point.place(), first_line(error));
  }
  if (info.rank == 0 && !info.hosts.loopback && point.token.empty()) {
    log_warning(
        "[comm.rendezvous] no token: any process that reaches {} can join this run. Set the same TESSERA_TOKEN or "
        "TESSERA_TOKEN_FILE on all hosts.",
        point.place());
  }
  if (!result.starts_with("ok")) {
    throw Error(result.starts_with("config") ? ErrorKind::kConfig : ErrorKind::kComm, result.substr(6));
  }
  return store;
}

}  // namespace tessera::comm
