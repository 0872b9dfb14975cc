// The meeting itself: opening the store, waiting for every rank, agreeing.
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/comm/errors/libtorch_error.h"
#include "tessera/comm/rendezvous/rendezvous.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// A socket that listens on the address of `host` only; c10d's own would listen on every interface.
int listen_on(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int failed = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  TESSERA_CHECK(!failed, ErrorKind::kConfig, "[comm.rendezvous] {}: {}. Wanted an address of rank 0's host.", host,
                ::gai_strerror(failed));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, ::freeaddrinfo);
  int reason = 0;
  for (const addrinfo* address = found; address; address = address->ai_next) {
    const int descriptor = ::socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, address->ai_protocol);
    if (descriptor < 0) continue;
    const int yes = 1;
    ::setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (::bind(descriptor, address->ai_addr, address->ai_addrlen) == 0 && ::listen(descriptor, 1024) == 0) return descriptor;
    reason = errno;
    ::close(descriptor);
  }
  TESSERA_CHECK(reason != EADDRINUSE, ErrorKind::kComm,
                "[comm.rendezvous] port {} of {} is in use. Choose another one: --master HOST:PORT or MASTER_PORT.", port, host);
  raise(ErrorKind::kConfig, "[comm.rendezvous] cannot listen on {}:{}: {}. Wanted an address of rank 0's host.", host, port,
        std::strerror(reason));
}

// A client of c10d waits for ever for the answer of a program that is no store and says nothing: its thread is left behind.
c10::intrusive_ptr<c10d::Store> connect_store(const std::string& host, const c10d::TCPStoreOptions& options) {
  const auto result = std::make_shared<std::promise<c10::intrusive_ptr<c10d::Store>>>();
  auto future = result->get_future();
  std::thread([result, host, options] {
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

c10::intrusive_ptr<c10d::Store> open_store(const Meeting& meeting, milliseconds timeout) {
  const WorldInfo& info = meeting.info;
  if (!meeting.folder.empty()) {
    return c10::make_intrusive<c10d::FileStore>(meeting.folder + "/store", info.size);
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(meeting.port);
  options.isServer = meeting.serve;
  options.numWorkers = info.size;
  options.waitWorkers = false;
  options.timeout = timeout;
  options.useLibUV = false;  // of use to the server alone; this one is in every build of libtorch
  if (meeting.serve) options.masterListenFd = listen_on(meeting.host, meeting.port);
  try {
    return connect_store(meeting.host, options);
  } catch (const std::exception& error) {
    raise(ErrorKind::kComm, "[comm.rendezvous] rank {} of {} found no one at {} within {} s ({}). Is rank 0 running there?",
          info.rank, info.size, meeting.place(), timeout.count() / 1000, first_line(error));
  }
}

// Host names alone repeat between clusters and containers.
std::string host_identity() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  std::string boot;
  try {
    boot = read_file("/proc/sys/kernel/random/boot_id", 4096);
  } catch (const Error&) {  // not mounted: the name has to do
  }
  return std::string(name) + "/" + boot.substr(0, boot.find('\n'));
}

std::string text_of(c10d::Store& store, const std::string& key) {
  const auto bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
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

std::string arrival(int rank) { return fmt::format("arrived/{}", rank); }

// Rank 0 looks at every rank and says "ok" and the hosts, or the error that all of them then raise.
std::string judge(c10d::Store& store, const Meeting& meeting, Clock::time_point deadline, milliseconds timeout) {
  const int size = meeting.info.size;
  std::string verdict = "ok", missing;
  for (int rank = 0; rank < size; ++rank) {
    if (!wait_for(store, arrival(rank), deadline)) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      continue;
    }
    const std::string said = text_of(store, arrival(rank));
    const std::string said_size = said.substr(0, said.find('\n'));
    if (said_size != std::to_string(size)) {
      return fmt::format("config[comm.rendezvous] rank {} says the world has {} ranks, rank 0 says {}. Start all with the same "
                         "numbers.", rank, said_size, size);
    }
    verdict += said.substr(said.find('\n'));
  }
  if (missing.empty()) return verdict;
  return fmt::format("comm  [comm.rendezvous] rank {} of {} did not arrive within {} s at {}", missing, size,
                     timeout.count() / 1000, meeting.place());
}

void settle_local(WorldInfo& info, std::string_view verdict) {
  std::vector<std::string_view> hosts;
  for (size_t line = verdict.find('\n'); line != verdict.npos;) {
    const size_t next = verdict.find('\n', line + 1);
    hosts.push_back(verdict.substr(line + 1, next == verdict.npos ? next : next - line - 1));
    line = next;
  }
  TESSERA_CHECK(hosts.size() == static_cast<size_t>(info.size), ErrorKind::kInternal,
                "[comm.rendezvous] {} hosts of {} ranks", hosts.size(), info.size);
  const auto own = hosts[info.rank];
  if (info.local_size == 0) {
    info.local_rank = static_cast<int>(std::count(hosts.begin(), hosts.begin() + info.rank, own));
    info.local_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), own));
  }
}

// The rank that runs the store ends with the same error: not before the others have read it, or 2 s have passed.
void let_others_hear(c10d::Store& store, const WorldInfo& info) {
  if (info.rank > 0) {
    store.add("heard", 1);
    return;
  }
  int64_t present = 0;
  for (int rank = 1; rank < info.size; ++rank) present += store.check({arrival(rank)}) ? 1 : 0;
  const auto deadline = Clock::now() + std::chrono::seconds(2);
  while (store.add("heard", 0) < present && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(10));
}

// What rank 0 says once all ranks are there or the time is over.
std::string hear_verdict(c10d::Store& store, const Meeting& meeting, Clock::time_point deadline, milliseconds timeout) {
  const WorldInfo& info = meeting.info;
  TESSERA_CHECK(store.add(fmt::format("seat/{}", info.rank), 1) == 1, ErrorKind::kConfig,
                "[comm.rendezvous] two processes say that they are rank {} of {} at {}", info.rank, info.size, meeting.place());
  store.set(arrival(info.rank), fmt::format("{}\n{}", info.size, host_identity()));
  if (info.rank == 0) {
    store.set("verdict", judge(store, meeting, deadline, timeout));
  } else {
    TESSERA_CHECK(wait_for(store, "verdict", deadline + std::chrono::seconds(2)), ErrorKind::kComm,
                  "[comm.rendezvous] rank 0 of {} did not arrive within {} s at {}", info.size, timeout.count() / 1000,
                  meeting.place());
  }
  std::string verdict = text_of(store, "verdict");
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
  auto store = c10::make_intrusive<c10d::PrefixStore>("tessera/" + meeting.prefix, open_store(meeting, timeout));
  std::string verdict;
  try {
    verdict = hear_verdict(*store, meeting, deadline, timeout);
  } catch (const c10::Error& error) {
    raise(ErrorKind::kComm, "[comm.rendezvous] rank {} of {} lost the store at {}: {}. Did rank 0 end?", info.rank, info.size,
          meeting.place(), first_line(error));
  }
  if (!verdict.starts_with("ok")) {
    throw Error(verdict.starts_with("config") ? ErrorKind::kConfig : ErrorKind::kComm, verdict.substr(6));
  }
  settle_local(info, verdict);
  return store;
}

}  // namespace tessera::comm
