// The meeting itself: opening the store, telling runs apart, waiting for every rank, agreeing.
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

constexpr milliseconds kLook{500};        // between looks at whether a rank dissents
constexpr milliseconds kPatience{10000};  // with another run at the same place

// c10d's own socket would listen on every interface.
Listening listen_for_ranks(const Meeting& meeting) {
  const bool one_host = meeting.info.local_size == meeting.info.size;
  try {
    Listening here = listen_at(meeting.host, meeting.port, one_host ? Reach::kThisHost : Reach::kOtherHosts);
    // Not on a wished interface alone: the others go where the name leads them, which is not known here.
    if (here.everywhere) {
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

// Another run is there, and why it is one.
class OtherRun final : public Error {
 public:
  explicit OtherRun(const std::string& message) : Error(ErrorKind::kConfig, message) {}
};

[[noreturn]] void throw_other_run(const Meeting& meeting, const Arrival& self, const std::string& run,
                                  const std::string& who) {
  throw OtherRun(fmt::format(
      "[comm.rendezvous] two runs at {}: this is {} of run '{}', there is {} of run '{}'. Give each a port of its own; "
      "if they are one, start all its hosts with the same --run-id or TESSERA_RUN_ID.",
      meeting.place(), self.who(), meeting.run, who, run));
}

[[noreturn]] void throw_other_token(const Meeting& meeting, const Arrival& self, const std::string& who) {
  throw OtherRun(
      fmt::format("[comm.rendezvous] {} at {} has another TESSERA_TOKEN than this, {}. Set the same one on all hosts.",
                  who, meeting.place(), self.who()));
}

// A client of c10d waits for ever for the answer of a program that is no store and says nothing: its thread is left
// behind.
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
    throw std::runtime_error("what listens there does not answer");
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
      Listening here = listen_for_ranks(meeting);
      address.host = here.address;  // the name may lead to a service that does not lead back
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
          "[comm.rendezvous] rank {} of {} found no one at {} within {} s ({}). Is rank 0 running there?", info.rank,
          info.size, meeting.place(), timeout.count() / 1000, first_line(error));
  }
}

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

// Empty where somebody else, or an earlier version, left something there.
RunName parse_run_name(const std::string& text) {
  try {
    const Json json = parse_json_object(text, "name", {.max_bytes = size_t{1} << 16, .max_depth = 1, .max_keys = 16});
    const JsonReader said(json, "name");
    return {.run = said.string("run", ""), .who = said.string("who", "")};
  } catch (const Error&) {
    return {};
  }
}

// In a store that asks nobody who he is, before anything that another run could feel: is rank 0, at this place, of the
// same run, and does it know the token?
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

// The store of this run. The last run at this place may be about to end: another one counts only after a while.
c10::intrusive_ptr<c10d::Store> find_run(const Meeting& meeting, const Arrival& self, Clock::time_point deadline,
                                         milliseconds timeout) {
  const auto patience = Clock::now() + std::min(timeout / 2, kPatience);
  for (;;) {
    try {
      const auto store =
          c10::make_intrusive<c10d::PrefixStore>("tessera/" + meeting.prefix, open_store(meeting, self, timeout));
      if (meeting.folder.empty() && !meeting.foreign_store) return store;  // it has asked
      return enter_run(store, meeting, self, deadline, timeout);
    } catch (const OtherRun&) {
      if (Clock::now() >= patience) throw;
    } catch (const c10::Error&) {  // it ended while it was asked
      if (Clock::now() >= patience) throw;
    }
    std::this_thread::sleep_for(kLook);
  }
}

// Two processes that say they are one rank: the second to come says so, and tells rank 0 when that shows that their
// launchers were started with unlike numbers.
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

// False: not until the deadline. Error kConfig when a rank dissents meanwhile.
bool await_arrival(c10d::Store& store, int rank, Clock::time_point deadline) {
  for (;;) {
    if (wait_for(store, arrival_key(rank), std::min(deadline, Clock::now() + kLook))) return true;
    if (store.check({"dissent"})) throw Error(ErrorKind::kConfig, store.get_to_str("dissent"));
    if (Clock::now() >= deadline) return false;
  }
}

// Rank 0 looks at every rank, tells each its place, and says "ok" and what hosts there are; else the error that all of
// them then raise.
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

// The rank that runs the store ends with the same error: not before the others have read it, or 2 s have passed.
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

// What rank 0 says once all ranks are there or the time is over.
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
        "[comm.rendezvous] no token: whoever reaches {} can join this run. Set the same TESSERA_TOKEN or "
        "TESSERA_TOKEN_FILE on all hosts.",
        meeting.place());
  }
  if (!verdict.starts_with("ok")) {
    throw Error(verdict.starts_with("config") ? ErrorKind::kConfig : ErrorKind::kComm, verdict.substr(6));
  }
  return store;
}

}  // namespace tessera::comm
