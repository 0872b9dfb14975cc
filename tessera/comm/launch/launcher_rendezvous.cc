#include "tessera/comm/launch/launcher_rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/machine/endpoint.h"
#include "tessera/base/machine/host.h"
#include "tessera/base/machine/listen.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/comm/rendezvous/run_store.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::minutes kPatience{5};
constexpr milliseconds kAttempt{2000}, kPause{200};
constexpr milliseconds kReadTimeout{10'000};  // limit for each other launcher to read the decision

std::string key_of(const char* kind, int host) { return fmt::format("{}/{}", kind, host); }

void put_json(c10d::Store& store, const std::string& key, const Json& value) { store.set(key, dump_json(value)); }

Json get_json(c10d::Store& store, const std::string& key) {
  return parse_json(store.get_to_str(key), "[launch] " + key);
}

Json json_of(const AttemptResult& end) {
  Json json = {{"exit_code", end.exit_code}, {"stop", end.asked_to_stop}};
  if (const auto& failure = end.failure) {
    json["failure"] = {{"text", failure->text},
                       {"cause", failure->cause},
                       {"exit_code", failure->exit_code},
                       {"from_outside", failure->from_outside},
                       {"consequence", end.consequence}};
  }
  return json;
}

// Returns the failure by which a restart is decided: the first one, in the order of hosts, that is not a consequence of
// another rank's failure; if all are consequences, the first one.
std::optional<RankFailure> cause_of(const std::vector<Json>& ends) {
  const Json* cause = nullptr;
  for (const auto& end : ends) {
    if (!end.contains("failure")) continue;
    const auto& failure = end["failure"];
    if (cause == nullptr || (cause->at("consequence").get<bool>() && !failure["consequence"].get<bool>())) {
      cause = &failure;
    }
  }
  if (cause == nullptr) return std::nullopt;
  return RankFailure{.text = cause->at("text").get<std::string>(),
                     .cause = cause->at("cause").get<std::string>(),
                     .exit_code = cause->at("exit_code").get<int>(),
                     .from_outside = cause->at("from_outside").get<bool>()};
}

// Waits 200 ms or until a signal arrives. Returns false when this launcher was asked to stop or the deadline has
// passed.
bool wait_a_moment(const SignalQueue& signals, Clock::time_point deadline) {
  if (asked_to_stop(signals) || Clock::now() > deadline) return false;
  signals.wait(kPause);
  return true;
}

JointRestartDecision no_restart(const AttemptResult& own, const std::string& why) {
  return {.decision = {.text = "no restart: " + why}, .exit_code = own.exit_code};
}

RunIdentity identity(const std::string& token, const std::string& id, int attempt, int host) {
  return {.token = token,
          .run = fmt::format("{}, launchers after attempt {}", id, attempt + 1),
          .who = fmt::format("the launcher of host {} (process {} on {})", host, ::getpid(), host_name())};
}

}  // namespace

LauncherRendezvous::LauncherRendezvous(const LauncherOptions& options, std::string id)
    : options_(options), id_(std::move(id)), token_(run_token([&](const char* name) -> std::optional<std::string> {
        if (options.token_file.empty()) return process_environment()(name);  // the same token as the ranks use
        if (std::string_view(name) == "TESSERA_TOKEN_FILE") return options.token_file;
        return std::nullopt;
      })) {}

JointRestartDecision LauncherRendezvous::meet(int attempt, const AttemptResult& own, const DecideRestart& decide,
                                              const SignalQueue& signals) const {
  return options_.node_rank == 0 ? decide_as_host_zero(attempt, own, decide, signals)
                                 : receive_decision(attempt, own, signals);
}

// Host 0: serves the store, reads key "end/HOST" of each other host, writes "decision", and waits for "read/HOST" so
// that the store does not end before all have read the decision. The run name of the store contains the attempt, so a
// launcher of another attempt cannot join.
JointRestartDecision LauncherRendezvous::decide_as_host_zero(int attempt, const AttemptResult& own,
                                                             const DecideRestart& decide,
                                                             const SignalQueue& signals) const {
  const auto deadline = Clock::now() + kPatience;
  const auto [master, port] = parse_endpoint(options_.master, "--master");
  const auto self = identity(token_, id_, attempt, 0);
  c10::intrusive_ptr<RunStore> store;
  while (!store) {
    try {
      auto here = listen_at(master, port, ListenScope::kOtherHosts);
      const RunStoreAddress address{here.address, here.port};
      const auto server = std::make_shared<RunStoreServer>(std::move(here.socket), self);
      store = c10::make_intrusive<RunStore>(address, self, kAttempt, server);
    } catch (const std::exception& error) {  // the port may be in use until the last connection of a rank has closed
      if (wait_a_moment(signals, deadline)) continue;
      return no_restart(own, as_error(error).what());
    }
  }
  std::vector<Json> ends = {json_of(own)};
  std::string missing;
  for (int host = 1; host < options_.nnodes && missing.empty(); ++host) {
    while (missing.empty() && !store->check({key_of("end", host)})) {
      if (!wait_a_moment(signals, deadline)) missing = fmt::format("the launcher of host {} did not connect", host);
    }
    if (missing.empty()) ends.push_back(get_json(*store, key_of("end", host)));
  }
  JointRestartDecision common{.exit_code = own.exit_code};
  const auto cause = cause_of(ends);
  const bool stop = std::ranges::any_of(ends, [](const Json& end) { return end["stop"].get<bool>(); });
  if (cause) common.exit_code = cause->exit_code;
  if (!missing.empty()) {
    common.decision.text = "no restart: " + missing;
  } else if (cause && !stop) {
    common.decision = decide(*cause, own.step);
  }
  put_json(*store, "decision",
           {{"restarts", common.decision.restarts},
            {"attempt", common.decision.attempt},
            {"tries", common.decision.tries},
            {"exit_code", common.exit_code},
            {"text", common.decision.text}});
  for (int host = 1; host < static_cast<int>(ends.size()); ++host) {
    const auto end = Clock::now() + kReadTimeout;
    while (!store->check({key_of("read", host)}) && Clock::now() < end) std::this_thread::sleep_for(kPause / 10);
  }
  return common;
}

// Runs on hosts other than 0. Sends this host's AttemptResult to the store of host 0's launcher, and returns the
// decision that decide_as_host_zero() stores there. Connecting is tried again until the deadline, because host 0's
// launcher may still wait for its ranks to end.
JointRestartDecision LauncherRendezvous::receive_decision(int attempt, const AttemptResult& own,
                                                          const SignalQueue& signals) const {
  const auto deadline = Clock::now() + kPatience;
  const auto [master, port] = parse_endpoint(options_.master, "--master");
  const auto self = identity(token_, id_, attempt, options_.node_rank);
  std::string reason = "asked to stop";
  while (wait_a_moment(signals, deadline)) {
    try {
      RunStore store({master, port}, self, kAttempt);
      put_json(store, key_of("end", options_.node_rank), json_of(own));
      while (!store.check({"decision"})) {
        if (wait_a_moment(signals, deadline)) continue;
        return no_restart(own, "this launcher was asked to stop, or another host's launcher did not connect in time");
      }
      const auto answer = get_json(store, "decision");
      put_json(store, key_of("read", options_.node_rank), true);
      return {.decision = {.restarts = answer.at("restarts").get<bool>(),
                           .attempt = answer.at("attempt").get<int>(),
                           .tries = answer.at("tries").get<int>(),
                           .text = answer.at("text").get<std::string>()},
              .exit_code = answer.at("exit_code").get<int>()};
    } catch (const std::exception& error) {  // no server yet, or the port is still that of the ranks' store
      reason = as_error(error).what();
    }
  }
  return no_restart(own, fmt::format("cannot reach the launcher of host 0 at {}: {}", options_.master, reason));
}

}  // namespace tessera::comm
