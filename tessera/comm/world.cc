#include "tessera/comm/world.h"

#include <algorithm>
#include <ATen/Parallel.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>
#include <mutex>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/peer_failed.h"
#include "tessera/comm/rendezvous.h"

namespace tessera::comm {

struct World::Impl {
  c10::intrusive_ptr<c10d::Store> store;
  std::string backend;
  std::shared_ptr<Group> everyone;
  std::map<std::string, int> groups_made;  // by name and ranks
  std::mutex mutex;                        // of what follows
  bool aborted = false;
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends;
  bool serves_store = false;  // this rank's process is the one that runs the others' store
  bool farewell = false;      // and so they tell it when they leave
};

World::World(WorldInfo info, c10::intrusive_ptr<c10d::Store> store, std::string backend, std::chrono::milliseconds timeout)
    : info_(std::move(info)), timeout_(timeout), impl_(std::make_unique<Impl>()) {
  impl_->store = std::move(store);
  impl_->backend = std::move(backend);
}

// Ranks that still make groups need the store, so the rank that runs it leaves last, within reason.
World::~World() {
  if (!impl_->farewell || impl_->aborted || std::uncaught_exceptions() > 0) return;
  try {
    const int64_t left = impl_->store->add("left", 1);
    if (left == info_.size) impl_->store->set("all_left", "1");
    if (impl_->serves_store) impl_->store->wait({"all_left"}, std::chrono::seconds(10));
  } catch (const std::exception&) {  // a rank or the store ended before: nobody is left to wait for
  }
}

std::shared_ptr<World> World::connect(const RendezvousFlags& flags) {
  Meeting meeting = find_meeting(flags, process_environment());
  if (meeting.info.size > 1) {
    set_log_prefix(fmt::format("rank {}: ", meeting.info.rank));
    if (meeting.info.rank > 0 && log_level() == LogLevel::kInfo) set_log_level(LogLevel::kWarning);
  }
  auto store = meet(meeting, flags.timeout);
  const WorldInfo& info = meeting.info;
  log_info("[comm.rendezvous] {} rank{}, {} on this host, from {}, met at {}", info.size, info.size == 1 ? "" : "s",
           info.local_size, info.source, meeting.place());
  auto world = create(info, std::move(store), flags.backend, flags.timeout);
  world->impl_->farewell = info.size > 1 && meeting.folder.empty();
  world->impl_->serves_store = meeting.serve;
  return world;
}

namespace {

// Gloo writes to sockets whose other end may be gone. That is to be its error, not the end of this process; a handler of
// the program's own stays.
void survive_broken_sockets() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

std::shared_ptr<World> World::create(WorldInfo info, c10::intrusive_ptr<c10d::Store> store, std::string backend,
                                     std::chrono::milliseconds timeout) {
  TESSERA_CHECK(info.size >= 1 && info.rank >= 0 && info.rank < info.size, ErrorKind::kConfig,
                "[comm.world] rank {} of {}: wanted 0 <= rank < size", info.rank, info.size);
  TESSERA_CHECK(backend == "auto" || backend == "gloo", ErrorKind::kConfig,
                "[comm.world] backend '{}' is not available in this build. Use auto or gloo.", backend);
  TESSERA_CHECK(store, ErrorKind::kInternal, "[comm.world] no store");
  store->setTimeout(timeout);
  if (info.size > 1) survive_broken_sockets();
  return std::shared_ptr<World>(new World(std::move(info), std::move(store), std::move(backend), timeout));
}

std::shared_ptr<World> World::single() { return create({}, c10::make_intrusive<c10d::HashStore>()); }

c10d::Store& World::store() const { return *impl_->store; }

std::shared_ptr<Group> World::group() {
  if (!impl_->everyone) {
    std::vector<int> ranks(info_.size);
    for (int rank = 0; rank < info_.size; ++rank) ranks[rank] = rank;
    impl_->everyone = new_group(ranks, "world");
  }
  return impl_->everyone;
}

int World::open_groups() const {
  const std::lock_guard lock(impl_->mutex);
  return static_cast<int>(std::count_if(impl_->backends.begin(), impl_->backends.end(),
                                        [](const auto& weak) { return !weak.expired(); }));
}

std::shared_ptr<Group> World::new_group(const std::vector<int>& ranks, const std::string& name) {
  int position = -1;
  std::string key = name + "/";
  std::vector<bool> seen(info_.size);
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int rank = ranks[i];
    TESSERA_CHECK(rank >= 0 && rank < info_.size && !seen[rank], ErrorKind::kShape,
                  "[comm.new_group] group '{}': rank {} is {}; wanted distinct ranks of the {}", name, rank,
                  rank >= 0 && rank < info_.size ? "listed twice" : "not in the world", info_.size);
    seen[rank] = true;
    if (rank == info_.rank) position = static_cast<int>(i);
    key += fmt::format("{}{}", i ? "," : "", rank);
  }
  TESSERA_CHECK(position >= 0, ErrorKind::kShape, "[comm.new_group] group '{}': this rank, {}, is not in it", name, info_.rank);
  if (ranks.size() == 1) return std::make_shared<Group>(name, ranks, 0, nullptr);

  key = fmt::format("group/{}/{}", key, impl_->groups_made[key]++);
  auto store = c10::make_intrusive<c10d::PrefixStore>(key, impl_->store);
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = make_gloo_backend(store, {.rank = position,
                                        .size = static_cast<int>(ranks.size()),
                                        .loopback = info_.local_size == info_.size,
                                        .timeout = timeout_});
  } catch (const std::exception& error) {
    const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
    const std::string reason = c10_error ? c10_error->what_without_backtrace() : error.what();
    const std::string message =
        fmt::format("[comm.new_group] group '{}' (rank {} of {}): {}. All its ranks must make it, within {} s.", name, position,
                    ranks.size(), reason.substr(0, reason.find('\n')), timeout_.count() / 1000);
    if (dynamic_cast<const PeerFailed*>(&error)) throw PeerFailed(message);
    throw Error(ErrorKind::kComm, message);
  }
  auto group = std::make_shared<Group>(name, ranks, position, backend);
  const std::lock_guard lock(impl_->mutex);
  if (impl_->aborted) group->abort();
  std::erase_if(impl_->backends, [](const auto& weak) { return weak.expired(); });
  impl_->backends.emplace_back(backend);
  return group;
}

void World::abort() noexcept {
  const std::lock_guard lock(impl_->mutex);
  impl_->aborted = true;
  for (const auto& weak : impl_->backends) {
    try {
      if (const auto backend = weak.lock()) backend->abort();
    } catch (...) {  // its connections were gone already
    }
  }
}

namespace {

// A store in memory whose waits end with an error once it is broken off.
class ThreadStore final : public c10d::HashStore {
 public:
  void break_off() {
    const std::lock_guard lock(m_);
    broken_ = true;
    cv_.notify_all();
  }

  using HashStore::wait;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    std::unique_lock lock(m_);
    const auto ready = [&] { return broken_ || checkLocked(lock, keys); };
    if (timeout == kNoTimeout) {
      cv_.wait(lock, ready);
    } else if (!cv_.wait_for(lock, timeout, ready)) {
      raise(ErrorKind::kComm, "[comm.store] {} did not arrive within {} ms", keys.empty() ? "" : keys[0], timeout.count());
    }
    if (broken_) throw PeerFailed("broken off because another rank failed");
  }
  std::vector<uint8_t> get(const std::string& key) override {
    wait({key}, timeout_);
    return HashStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys, timeout_);
    return HashStore::multiGet(keys);
  }

 private:
  bool broken_ = false;
};

}  // namespace

void run_thread_ranks(int size, const std::function<void(std::shared_ptr<World>)>& body) {
  TESSERA_CHECK(size >= 1, ErrorKind::kConfig, "[comm.run_thread_ranks] {} ranks: wanted at least 1", size);
  const auto store = c10::make_intrusive<ThreadStore>();
  std::vector<std::shared_ptr<World>> worlds;  // kept until all ranks have ended: a peer may still be reading
  for (int rank = 0; rank < size; ++rank) {
    worlds.push_back(World::create(
        {.rank = rank, .size = size, .local_rank = rank, .local_size = size, .source = "threads"}, store));
  }
  const int threads_before = at::get_num_threads();
  const int threads_each = std::max(1, threads_before / size);
  std::mutex mutex;
  std::exception_ptr cause, consequence;
  const auto fail = [&](std::exception_ptr& slot) {
    {
      const std::lock_guard lock(mutex);
      if (!slot) slot = std::current_exception();
    }
    store->break_off();
    for (const auto& world : worlds) world->abort();
  };
  const auto run_rank = [&](int rank) {
    at::set_num_threads(threads_each);
    try {
      body(worlds[rank]);
    } catch (const PeerFailed&) {
      fail(consequence);
    } catch (...) {
      fail(cause);
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run_rank, rank);
  for (auto& thread : threads) thread.join();
  at::set_num_threads(threads_before);  // new threads inherit the value set last anywhere
  if (cause || consequence) std::rethrow_exception(cause ? cause : consequence);
}

}  // namespace tessera::comm
