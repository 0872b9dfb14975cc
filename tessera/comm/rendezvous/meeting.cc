// The rendezvous: meet() opens the store, checks that all ranks are of one run, waits for every rank, and distributes
// what rank 0 computed from their records.
//
// Keys of the store, in the order in which they are written:
//   seat/R      counter; the process that makes it 1 is rank R
//   arrived/R   the Arrival of rank R
//   dissent     an error found by a second process that claims to be rank R
//   place/R     the Place of rank R, written by rank 0
//   verdict     by rank 0: "ok" and the Hosts, or six characters for the kind ("config", "comm  ") and the message
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
#include "tessera/comm/rendezvous/arrivals.h"
#include "tessera/comm/rendezvous/hub_store.h"
#include "tessera/comm/rendezvous/rendezvous.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLook{500};        // interval between checks of key "dissent"
constexpr milliseconds kPatience{10000};  // time for a previous run at the same address to end

// Opens the listener of the store. Tessera listens itself because c10d's socket would listen on every interface.
ListeningSocket listen_for_ranks(const Meeting& meeting) {
  const bool one_host = meeting.info.local_size == meeting.info.size;
  try {
    ListeningSocket here =
        listen_at(meeting.host, meeting.port, one_host ? ListenScope::kThisHost : ListenScope::kOtherHosts);
    // GLOO_SOCKET_IFNAME does not restrict this socket: other hosts resolve the name themselves, and the address they
    // find is not known here.
    if (here.on_all_interfaces) {
      log_info("[comm.rendezvous] {} is loopback or no address here: the store listens on every interface, port {}",
               meeting.host, meeting.port);
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

Arrival introduce_self(const Meeting& meeting) {
  const WorldInfo& info = meeting.info;
  return {.rank = info.rank,
          .size = info.size,
          .local_rank = info.local_rank,
          .local_size = info.local_size,
          .pid = ::getpid(),
          .host_name = host_name(),
          .host = host_identity(),
          .cores = core_mask(),
          .address = !meeting.folder.empty()        ? ""
                     : info.local_size == info.size ? address_towards(meeting.host)
                                                    : own_address(meeting.host)};
}

// Error kConfig: the store at this address belongs to another run.
class OtherRun final : public Error {
 public:
  explicit OtherRun(const std::string& message) : Error(ErrorKind::kConfig, message) {}
};

[[noreturn]] void throw_other_run(const Meeting& meeting, const Arrival& self, const std::string& run,
                                  const std::string& who) {
  throw OtherRun(fmt::format(
      "[comm.rendezvous] two runs at {}: this is {} of run '{}', there is {} of run '{}'. Give each run its own port; "
      "if this is one run, start all its hosts with the same --run-id or TESSERA_RUN_ID.",
      meeting.place(), self.who(), meeting.run, who, run));
}

[[noreturn]] void throw_other_token(const Meeting& meeting, const Arrival& self, const std::string& who) {
  throw OtherRun(fmt::format(
      "[comm.rendezvous] {} at {} has another TESSERA_TOKEN than this, {}. Set the same token on all hosts.", who,
      meeting.place(), self.who()));
}

// Connects to torchrun's store. c10d's client waits without a limit when another program listens there and sends
// nothing, so the client is made on a thread of its own, which is abandoned after the timeout.
c10::intrusive_ptr<c10d::Store> connect_foreign_store(const Meeting& meeting, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(meeting.port);
  options.waitWorkers = false;
  options.timeout = timeout;
  const auto result = std::make_shared<std::promise<c10::intrusive_ptr<c10d::Store>>>();
  auto future = result->get_future();
  std::thread([result, host = meeting.host, options] {
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

HubIdentity identity_of(const Meeting& meeting, const Arrival& self) {
  return {.token = meeting.token, .run = meeting.run, .who = self.who()};
}

c10::intrusive_ptr<c10d::Store> open_store(const Meeting& meeting, const Arrival& self, milliseconds timeout) {
  const WorldInfo& info = meeting.info;
  if (!meeting.folder.empty()) return c10::make_intrusive<c10d::FileStore>(meeting.folder + "/store", info.size);
  try {
    if (meeting.foreign_store) return connect_foreign_store(meeting, timeout);
    std::shared_ptr<HubServer> server;
    HubAddress address{.host = meeting.host, .port = meeting.port};
    if (meeting.serve) {
      ListeningSocket here = listen_for_ranks(meeting);
      address.host = here.address;  // the name may resolve to a forwarding service that is not reachable from here
      server = std::make_shared<HubServer>(std::move(here.socket), identity_of(meeting, self));
    }
    return c10::make_intrusive<HubStore>(address, identity_of(meeting, self), timeout, server);
  } catch (const HubRefusal& refusal) {
    if (refusal.why == HubAnswer::kWrongRun) throw_other_run(meeting, self, refusal.run, refusal.who);
    throw_other_token(meeting, self, refusal.who);
  } catch (const std::exception& error) {
    const auto* own = dynamic_cast<const Error*>(&error);
    if (own && meeting.serve) throw;
    raise(ErrorKind::kComm,
          "[comm.rendezvous] rank {} of {} found no store at {} within {} s ({}). Is rank 0 running there?", info.rank,
          info.size, meeting.place(), timeout.count() / 1000, first_line(error));
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

std::string arrival_key(int rank) { return fmt::format("arrived/{}", rank); }
std::string place_key(int rank) { return fmt::format("place/{}", rank); }

struct RunName {
  std::string run, who;
};

// Returns an empty name when another program or an earlier version has left the text.
RunName parse_run_name(const std::string& text) {
  try {
    const Json json = parse_json_object(text, "name", {.max_bytes = size_t{1} << 16, .max_depth = 1, .max_keys = 16});
    const JsonReader said(json, "name");
    return {.run = said.string("run", ""), .who = said.string("who", "")};
  } catch (const Error&) {
    return {};
  }
}

// Checks run and token in a store without authentication (file store, torchrun's store), before this rank writes
// anything. Rank 0 publishes its run under "name" and sets "known" under a prefix that contains the token. Another rank
// compares the run and finds "known" only if it has the same token. The returned store has that prefix.
c10::intrusive_ptr<c10d::Store> enter_run(const c10::intrusive_ptr<c10d::Store>& store, const Meeting& meeting,
                                          const Arrival& self, Clock::time_point deadline, milliseconds timeout) {
  auto own = c10::make_intrusive<c10d::PrefixStore>("run/" + meeting.token, store);
  if (self.rank == 0) {
    own->set("known", "yes");
    store->set("name", nlohmann::json{{"run", meeting.run}, {"who", self.who()}}.dump());
    return own;
  }
  TESSERA_CHECK(wait_for(*store, "name", deadline + std::chrono::seconds(2)), ErrorKind::kComm,
                "[comm.rendezvous] rank 0 of {} did not arrive within {} s at {}", self.size, timeout.count() / 1000,
                meeting.place());
  const auto [run, who] = parse_run_name(store->get_to_str("name"));
  if (run != meeting.run && !run.empty() && !meeting.run.empty()) throw_other_run(meeting, self, run, who);
  if (!own->check({"known"})) throw_other_token(meeting, self, who);
  return own;
}

// Opens the store of this run. A previous run at this address may still be ending, so a store of another run is an
// error only after kPatience.
c10::intrusive_ptr<c10d::Store> find_run(const Meeting& meeting, const Arrival& self, Clock::time_point deadline,
                                         milliseconds timeout) {
  const auto patience = Clock::now() + std::min(timeout / 2, kPatience);
  for (;;) {
    try {
      const auto store =
          c10::make_intrusive<c10d::PrefixStore>("tessera/" + meeting.prefix, open_store(meeting, self, timeout));
      if (meeting.folder.empty() && !meeting.foreign_store) return store;  // the hello was checked
      return enter_run(store, meeting, self, deadline, timeout);
    } catch (const OtherRun&) {
      if (Clock::now() >= patience) throw;
    } catch (const c10::Error&) {  // the store ended meanwhile
      if (Clock::now() >= patience) throw;
    }
    std::this_thread::sleep_for(kLook);
  }
}

// Registers this process as its rank. When two processes claim one rank, the second one throws. If their world sizes
// differ, their launchers were started with different numbers, and the second process also sets "dissent" so that rank
// 0 gives this error to all ranks.
void take_seat(c10d::Store& store, const Meeting& meeting, const Arrival& self) {
  if (store.add(fmt::format("seat/{}", self.rank), 1) == 1) {
    store.set(arrival_key(self.rank), self.text());
    return;
  }
  std::string other = "another process";
  if (wait_for(store, arrival_key(self.rank), Clock::now() + std::chrono::seconds(2))) {
    const Arrival seated = Arrival::parse(store.get_to_str(arrival_key(self.rank)));
    other = seated.who();
    if (seated.size != self.size) {
      const std::string dissent = sizes_differ(seated, self);
      store.set("dissent", dissent);
      throw Error(ErrorKind::kConfig, dissent);
    }
  }
  raise(ErrorKind::kConfig, "[comm.rendezvous] two processes say that they are rank {} of {} at {}: {}, and this, {}",
        self.rank, self.size, meeting.place(), other, self.who());
}

// Waits for the record of a rank; returns false at the deadline. Error kConfig when "dissent" is set meanwhile.
bool await_arrival(c10d::Store& store, int rank, Clock::time_point deadline) {
  for (;;) {
    if (wait_for(store, arrival_key(rank), std::min(deadline, Clock::now() + kLook))) return true;
    if (store.check({"dissent"})) throw Error(ErrorKind::kConfig, store.get_to_str("dissent"));
    if (Clock::now() >= deadline) return false;
  }
}

// Rank 0: waits for the record of every rank, writes each rank's Place, and returns the text of "verdict": "ok" and the
// hosts, or the error that all ranks will throw.
std::string judge(c10d::Store& store, const Meeting& meeting, Clock::time_point deadline, milliseconds timeout) {
  std::vector<Arrival> arrivals;
  std::string missing;
  try {
    for (int rank = 0; rank < meeting.info.size; ++rank) {
      if (await_arrival(store, rank, deadline)) {
        arrivals.push_back(Arrival::parse(store.get_to_str(arrival_key(rank))));
        if (arrivals.back().size != meeting.info.size) {
          throw Error(ErrorKind::kConfig, sizes_differ(arrivals.front(), arrivals.back()));
        }
      } else {
        missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      }
    }
    if (missing.empty()) {
      const Agreement agreed = agree(arrivals);
      for (const Arrival& one : arrivals) store.set(place_key(one.rank), agreed.places.at(one.rank).text());
      return "ok" + text_of_hosts(agreed.hosts);
    }
  } catch (const Error& error) {
    return (error.kind() == ErrorKind::kConfig ? "config" : "comm  ") + std::string(error.what());
  }
  return fmt::format("comm  [comm.rendezvous] rank {} of {} did not arrive within {} s at {}", missing,
                     meeting.info.size, timeout.count() / 1000, meeting.place());
}

// After an error: rank 0, whose process runs the store, waits until the other ranks have read the error, 2 s at most.
void let_others_hear(c10d::Store& store, const WorldInfo& info) {
  if (info.rank > 0) {
    store.add("heard", 1);
    return;
  }
  int64_t present = 0;
  for (int rank = 1; rank < info.size; ++rank) present += store.check({arrival_key(rank)}) ? 1 : 0;
  const auto deadline = Clock::now() + std::chrono::seconds(2);
  while (store.add("heard", 0) < present && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(10));
}

// Returns the text of "verdict", which rank 0 writes once all ranks have arrived or the time is over. Other ranks wait
// 2 s longer, so that they receive rank 0's message instead of a time-out of their own.
std::string hear_verdict(c10d::Store& store, const Meeting& meeting, Clock::time_point deadline, milliseconds timeout) {
  const WorldInfo& info = meeting.info;
  if (info.rank == 0) {
    store.set("verdict", judge(store, meeting, deadline, timeout));
  } else {
    TESSERA_CHECK(wait_for(store, "verdict", deadline + std::chrono::seconds(2)), ErrorKind::kComm,
                  "[comm.rendezvous] rank 0 of {} did not arrive within {} s at {}", info.size, timeout.count() / 1000,
                  meeting.place());
  }
  std::string verdict = store.get_to_str("verdict");
  if (!verdict.starts_with("ok")) let_others_hear(store, info);
  return verdict;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> meet(Meeting& meeting, milliseconds timeout) {
  WorldInfo& info = meeting.info;
  if (info.size == 1) {
    info.local_size = 1;
    info.local_rank = 0;
    return c10::make_intrusive<c10d::HashStore>();
  }
  const auto deadline = Clock::now() + timeout;
  c10::intrusive_ptr<c10d::Store> store;
  std::string verdict;
  try {
    const Arrival self = introduce_self(meeting);
    store = find_run(meeting, self, deadline, timeout);
    take_seat(*store, meeting, self);
    verdict = hear_verdict(*store, meeting, deadline, timeout);
    if (verdict.starts_with("ok")) {
      info.hosts = hosts_of_text(verdict.substr(2));
      const Place place = Place::parse(store->get_to_str(place_key(info.rank)));
      info.local_rank = place.local_rank;
      info.local_size = place.local_size;
      info.cores_per_rank = place.cores_per_rank;
      meeting.other_host = place.other_host.empty() ? meeting.host : place.other_host;
    }
  } catch (const c10::Error& error) {
    raise(ErrorKind::kComm, "[comm.rendezvous] rank {} of {} lost the store at {}: {}. Did rank 0 end?", info.rank,
          info.size, meeting.place(), first_line(error));
  }
  if (info.rank == 0 && !info.hosts.loopback && meeting.token.empty()) {
    log_warning(
        "[comm.rendezvous] no token: any process that reaches {} can join this run. Set the same TESSERA_TOKEN or "
        "TESSERA_TOKEN_FILE on all hosts.",
        meeting.place());
  }
  if (!verdict.starts_with("ok")) {
    throw Error(verdict.starts_with("config") ? ErrorKind::kConfig : ErrorKind::kComm, verdict.substr(6));
  }
  return store;
}

}  // namespace tessera::comm
