#include "tessera/comm/rendezvous/world.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <signal.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/machine/host.h"
#include "tessera/comm/backends/backend_choice.h"
#include "tessera/comm/backends/device_backends.h"
#include "tessera/comm/backends/fake_backend.h"
#include "tessera/comm/backends/interface_choice.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/rendezvous/new_group_like.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/comm/rendezvous/watched_store.h"
#include "tessera/comm/watch/flight_record.h"
#include "tessera/comm/watch/monitor.h"
#include "tessera/comm/watch/thread_failure_reporter.h"
#include "tessera/comm/watch/watchdog.h"

namespace tessera::comm {

namespace {

// Deleter of the groups that a world has made. It marks the deletion in the monitor: after a rank has failed, Gloo may
// never finish the destruction, and the watchdog then ends the process.
struct GroupDeleter {
  std::shared_ptr<Monitor> monitor;
  std::weak_ptr<World> world;
  void operator()(Group* ends) const {
    const auto closes = monitor->close();
    delete ends;
  }
};

}  // namespace

struct World::Impl {
  std::weak_ptr<World> self;
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<Monitor> monitor;
  std::map<c10::DeviceType, std::shared_ptr<Group>> world_groups;
  std::shared_ptr<FakeCostAccount> account;  // set: this is a fake world
  std::map<std::string, int> groups_made;    // number of groups made, by name and ranks
  std::mutex mutex;                          // guards `aborted`, `backends` and `aborted_backends`
  bool aborted = false;
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends;
  std::vector<c10::intrusive_ptr<c10d::Backend>> aborted_backends;  // back-ends that abort() has aborted
  bool serves_store = false;                                        // this rank's process runs the store of all ranks
  int fake_local_size = 1;
  // For each device type and list of ranks: the first back-end for an accelerator. With split_groups, later back-ends
  // of these ranks split their communicators from it; new_group_by_split() splits from that of all ranks of the world.
  // The map keeps each one until destroy_groups(), so a back-end to split from exists on all ranks or on none.
  std::map<std::pair<c10::DeviceType, std::vector<int>>, c10::intrusive_ptr<c10d::Backend>> split_parents;
  bool reports_leaving = false;  // ranks report to the store when they leave (leave_store)

  c10::intrusive_ptr<c10d::Backend> split_parent(const std::pair<c10::DeviceType, std::vector<int>>& which) const {
    const auto found = split_parents.find(which);
    return found == split_parents.end() ? nullptr : found->second;
  }

  bool is_aborted() {
    const std::lock_guard lock(mutex);
    return aborted;
  }

  // Registers the back-ends for abort(). A group that is made after an abort is aborted at once.
  void register_for_abort(const std::vector<c10::intrusive_ptr<c10d::Backend>>& of_group, Group& group) {
    const std::lock_guard lock(mutex);
    if (aborted) group.abort();
    std::erase_if(backends, [](const auto& weak) { return weak.expired(); });
    for (const auto& backend : of_group) {
      if (backend) backends.emplace_back(backend);
    }
  }

  // Destroys the groups and aborted back-ends while the watchdog still runs: the watchdog ends the process if a
  // destructor hangs.
  void destroy_groups() {
    const auto closes = monitor->close();
    world_groups.clear();
    split_parents.clear();
    std::vector<c10::intrusive_ptr<c10d::Backend>> ended;
    const std::lock_guard lock(mutex);
    aborted_backends.swap(ended);
  }
};

World::World(WorldInfo info, c10::intrusive_ptr<c10d::Store> store, WorldOptions options)
    : info_(std::move(info)), options_(std::move(options)), impl_(std::make_unique<Impl>()) {
  impl_->store = std::move(store);
  impl_->monitor = std::make_shared<Monitor>(MonitorOptions{.rank = info_.rank,
                                                            .size = info_.size,
                                                            .check = parse_check_mode(options_.check),
                                                            .timeout = options_.timeout,
                                                            .trace_folder = options_.trace_folder,
                                                            .ends_process = options_.ends_process});
}

// Without a failure, the rank whose process runs the store waits in leave_store() for the other ranks, which need the
// store while they make groups. After a failure or an abort, leave_store() returns at once, and destroy_groups() is
// called. The watchdog still runs then, because monitor->leave(), which ends it, is called last.
World::~World() {
  const bool failed = std::uncaught_exceptions() > 0;
  if (failed) impl_->monitor->report_own_failure();
  leave_store(failed);
  if (failed || impl_->is_aborted()) impl_->destroy_groups();
  impl_->monitor->leave(failed);
}

// Every rank increments the counter "left" in the store. The rank whose process runs the store waits until all ranks
// have done this, 10 s at most.
void World::leave_store(bool failed) noexcept {
  if (failed || !impl_->reports_leaving || impl_->is_aborted()) return;
  try {
    const int64_t left = impl_->store->add("left", 1);
    if (left == info_.size) impl_->store->set("all_left", "1");
    if (impl_->serves_store) impl_->store->wait({"all_left"}, std::chrono::seconds(10));
  } catch (const std::exception&) {  // a rank or the store has ended before: there is no rank to wait for
  }
}

namespace {

// The address for the watchdog. Rank 0 listens on the interface that the user has chosen (GLOO_SOCKET_IFNAME), if any;
// the other ranks read rank 0's addresses from the store, and try the master's address first.
std::string watch_address_of(const RendezvousPoint& point) {
  if (point.info.rank > 0 || requested_interfaces().empty()) return point.host;
  return own_address(point.other_host);
}

}  // namespace

// On ranks other than 0 info messages are off, so that each message is logged once per run.
std::shared_ptr<World> World::connect(const RendezvousFlags& flags) {
  RendezvousPoint point = find_rendezvous(flags, process_environment());
  if (point.info.size > 1) {
    set_log_prefix(fmt::format("rank {}: ", point.info.rank));
    if (point.info.rank > 0 && log_level() == LogLevel::kInfo) set_log_level(LogLevel::kWarning);
  }
  if (point.info.size > 1) raise_open_files_limit();
  auto store = meet(point, flags.timeout);
  const WorldInfo& info = point.info;
  log_info("[comm.rendezvous] {} rank{}, {} on this host, from {}, met at {}", info.size, info.size == 1 ? "" : "s",
           info.local_size, info.source, point.place());
  const bool one_host = info.hosts.loopback;
  auto world = create(info, std::move(store),
                      {.backend = flags.backend,
                       .timeout = flags.timeout,
                       .check = flags.check,
                       .trace_folder = flags.trace_folder,
                       .watch_address = one_host ? "" : watch_address_of(point),
                       .other_host = one_host ? "" : point.other_host,
                       .ends_process = true});
  world->impl_->reports_leaving = info.size > 1 && point.folder.empty();
  world->impl_->serves_store = point.serve;
  return world;
}

namespace {

// Ignores SIGPIPE, unless the program has a handler. Gloo writes to sockets whose peer may have ended; the write must
// fail with an error and not end this process.
void ignore_sigpipe() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

// Time without a message after which a rank counts as dead; 0: no limit, e.g. under a debugger. The limit is larger
// between hosts, because a network switch may restart.
std::chrono::milliseconds silence_from_environment(bool one_host) {
  const char* text = std::getenv("TESSERA_SILENCE_SECONDS");
  if (!text || !*text) return std::chrono::seconds(one_host ? 4 : 60);
  char* end = nullptr;
  const long seconds = std::strtol(text, &end, 10);
  TESSERA_CHECK(
      *end == '\0' && seconds >= 0 && seconds <= 86400, ErrorKind::kConfig,
      "[comm.watchdog] TESSERA_SILENCE_SECONDS='{}': wanted 0 to 86400; 0: a silent rank never counts as dead", text);
  return std::chrono::seconds(seconds);
}

// Returns the folder for this run's flight records, a new folder inside `folder`; "" when `folder` is empty. Rank 0
// chooses the name and the others read it from the store. COLLECTIVE over all ranks.
std::string folder_of_records(c10d::Store& store, const WorldInfo& info, const std::string& folder) {
  constexpr const char* kKey = "records";
  std::string name = new_records_name();
  if (info.rank == 0 && info.size > 1) store.set(kKey, name);
  if (folder.empty()) return "";
  if (info.rank > 0) {
    try {
      name = store.get_to_str(kKey);
    } catch (const c10::Error& error) {
      raise(ErrorKind::kComm, "[comm.world] rank 0 of {} did not set the folder of flight records: {}", info.size,
            first_line(error));
    }
  }
  return (std::filesystem::path(folder) / name).string();
}

// Sets info.hosts and info.cores_per_rank without communication. Assumes that every host has as many ranks and as many
// cores as this host.
void assume_hosts(WorldInfo& info) {
  const int local_size = std::max(1, info.local_size);
  info.cores_per_rank = usable_cores() / local_size;
  info.hosts = {.count = (info.size + local_size - 1) / local_size,
                .least_ranks = local_size,
                .most_ranks = local_size,
                .least_cores_per_rank = info.cores_per_rank,
                .loopback = info.local_size == info.size};
}

}  // namespace

std::shared_ptr<World> World::create(WorldInfo info, c10::intrusive_ptr<c10d::Store> store, WorldOptions options) {
  TESSERA_CHECK(info.size >= 1 && info.rank >= 0 && info.rank < info.size, ErrorKind::kConfig,
                "[comm.world] rank {} of {}: wanted 0 <= rank < size", info.rank, info.size);
  TESSERA_CHECK(is_backend(options.backend), ErrorKind::kConfig,
                "[comm.world] backend '{}' is unknown. Use auto, shm, gloo or nccl.", options.backend);
  TESSERA_CHECK(store, ErrorKind::kInternal, "[comm.world] no store");
  store->setTimeout(options.timeout);
  if (info.size > 1) ignore_sigpipe();
  if (info.hosts.count == 0) assume_hosts(info);
  const char* folder = std::getenv("TESSERA_TRACE_DIR");
  options.trace_folder = folder_of_records(*store, info, folder && *folder ? folder : options.trace_folder);
  std::shared_ptr<World> world(new World(std::move(info), std::move(store), std::move(options)));
  world->impl_->self = world;
  if (world->size() > 1) world->start_watch();
  return world;
}

// Connects the monitor to the other ranks: by a ThreadFailureReporter if the ranks are threads, otherwise by a
// watchdog. There is no watchdog if the ranks are on several hosts and WorldOptions::watch_address is empty, as in a
// world that create() made.
void World::start_watch() {
  Monitor& monitor = *impl_->monitor;
  monitor.set_abort_groups([this] { abort(); });
  if (options_.threads) {
    monitor.set_reporter(std::make_unique<ThreadFailureReporter>(options_.threads, info_.rank, monitor));
    return;
  }
  write_records_on_signal();
  const bool one_host = info_.hosts.loopback;
  if (!one_host && options_.watch_address.empty()) return;
  c10d::PrefixStore store("watch", impl_->store);
  monitor.set_reporter(start_watchdog(store,
                                      {.rank = info_.rank,
                                       .size = info_.size,
                                       .address = options_.watch_address.empty() ? "127.0.0.1" : options_.watch_address,
                                       .reach = one_host ? ListenScope::kThisHost : ListenScope::kOtherHosts,
                                       .timeout = options_.timeout,
                                       .silence = silence_from_environment(one_host),
                                       .compare = monitor.options().check != CheckMode::kOff},
                                      monitor));
}

Monitor& World::monitor() const { return *impl_->monitor; }

std::shared_ptr<World> World::single() { return create({}, c10::make_intrusive<c10d::HashStore>()); }

int World::device_index() const { return device_of_rank(c10::DeviceType::CUDA, info_.local_rank).index(); }

c10d::Store& World::store() const { return *impl_->store; }

std::shared_ptr<World> World::create_fake(int rank, int size, std::shared_ptr<FakeCostAccount> account,
                                          int local_size) {
  TESSERA_CHECK(size >= 1 && rank >= 0 && rank < size && local_size >= 1, ErrorKind::kConfig,
                "[comm.world] fake rank {} of {}, {} per host: wanted 0 <= rank < size", rank, size, local_size);
  TESSERA_CHECK(account, ErrorKind::kInternal, "[comm.world] a fake world without an account");
  const WorldInfo info{.rank = rank,
                       .size = size,
                       .local_rank = rank % local_size,
                       .local_size = std::min(local_size, size - rank / local_size * local_size),
                       .source = "fake",
                       .hosts = {.count = (size + local_size - 1) / local_size,
                                 .least_ranks = size % local_size ? size % local_size : local_size,
                                 .most_ranks = std::min(local_size, size)}};
  std::shared_ptr<World> world(new World(info, c10::make_intrusive<c10d::HashStore>(), {}));
  world->impl_->self = world;
  world->impl_->account = std::move(account);
  world->impl_->fake_local_size = local_size;
  return world;
}

std::vector<int> World::all_ranks() const {
  std::vector<int> ranks(info_.size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::shared_ptr<Group> World::group(c10::DeviceType device) {
  std::shared_ptr<Group>& world_group = impl_->world_groups[device];
  if (!world_group) world_group = new_group(all_ranks(), "world", device);
  return world_group;
}

c10::intrusive_ptr<c10d::Backend> World::make_backend(const std::string& name,
                                                      const c10::intrusive_ptr<c10d::Store>& store,
                                                      const std::vector<int>& ranks, int position) const {
  const int size = static_cast<int>(ranks.size());
  if (impl_->account) {
    const auto host = [&](int rank) { return rank / impl_->fake_local_size; };
    const bool one_host = std::ranges::all_of(ranks, [&](int rank) { return host(rank) == host(ranks[0]); });
    return make_fake_backend(position, size, one_host, impl_->account);
  }
  return choose_backend(store, {.requested = options_.backend,
                                .group = name,
                                .rank = position,
                                .size = size,
                                .ranks = ranks,
                                .oversubscribed = info_.cores_per_rank < 1,
                                .one_host = info_.hosts.loopback,
                                .other_host = options_.other_host,
                                .timeout = options_.timeout});
}

int World::open_groups() const {
  const std::lock_guard lock(impl_->mutex);
  return static_cast<int>(std::ranges::count_if(impl_->backends, [](const auto& weak) { return !weak.expired(); }));
}

namespace {

// Throws the error of a group that could not be made. Store and back-end only see that a connection broke. The watchdog
// finds the rank that ended, so this waits up to 2 s for the watchdog's report.
[[noreturn]] void throw_group_error(const std::string& which, const std::exception& error, Monitor& monitor) {
  constexpr std::chrono::milliseconds kReportTimeout{2000};
  if (const auto report = monitor.wait_for_failure_report(kReportTimeout)) throw_failure_report(*report, which + ": ");
  const std::string message = fmt::format("{}: {}. All ranks of the group must make it within {} s.", which,
                                          first_line(error), monitor.options().timeout.count() / 1000);
  if (dynamic_cast<const PeerFailed*>(&error)) throw PeerFailed(message);
  throw Error(ErrorKind::kComm, message);
}

// Runs a barrier as the first collective of a new group, because NCCL makes the group's communicator in the first
// collective, by a split of the parent communicator. NCCL forbids a split while the parent communicator is in use, so
// the device is synchronized before the barrier.
void make_communicator(Group& group, c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  barrier(group, device);
}

}  // namespace

std::shared_ptr<Group> World::new_group(const std::vector<int>& ranks, const std::string& name,
                                        c10::DeviceType device) {
  return make_group(ranks, name, device, std::nullopt);
}

std::shared_ptr<Group> World::new_group_by_split(const std::vector<int>& ranks, const std::string& name,
                                                 c10::DeviceType device, int part) {
  group(device);  // the communicator from which the parts are split
  return make_group(ranks, name, device, part);
}

// Ranks of a group meet under a key of the store that contains name, ranks and the number of earlier groups with both;
// these are equal on all members without communication. The id of the group is a hash of this key.
std::shared_ptr<Group> World::make_group(const std::vector<int>& ranks, const std::string& name, c10::DeviceType device,
                                         std::optional<int> part) {
  int position = -1;
  std::vector<bool> seen(info_.size);
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int rank = ranks[i];
    TESSERA_CHECK(rank >= 0 && rank < info_.size && !seen[rank], ErrorKind::kShape,
                  "[comm.new_group] group '{}': rank {} is {}; wanted distinct ranks of a world of {}", name, rank,
                  rank >= 0 && rank < info_.size ? "listed twice" : "not in the world", info_.size);
    seen[rank] = true;
    if (rank == info_.rank) position = static_cast<int>(i);
  }
  TESSERA_CHECK(position >= 0, ErrorKind::kShape,
                "[comm.new_group] group '{}': this rank, {}, is not in the list of its ranks", name, info_.rank);
  if (ranks.size() == 1) return std::make_shared<Group>(name, ranks, 0, nullptr);

  const XXH128_hash_t members = XXH3_128bits(ranks.data(), ranks.size() * sizeof(int));
  std::string key = fmt::format("{}/{:016x}{:016x}", name, members.high64, members.low64);
  key = fmt::format("group/{}/{}", key, impl_->groups_made[key]++);
  const auto store = c10::make_intrusive<WatchedStore>(key, impl_->store, impl_->monitor);
  c10::intrusive_ptr<c10d::Backend> backend, accelerator;
  const bool for_cuda = device == c10::DeviceType::CUDA || options_.backend == "nccl";
  const auto type = for_cuda ? c10::DeviceType::CUDA : device;
  // Whether the group gets a second back-end, for tensors of the accelerator. A fake world has no second back-end. With
  // comm.backend=gloo there is none for CUDA, so CUDA tensors go through `backend`.
  const bool accelerated = type != c10::DeviceType::CPU && !impl_->account && !(for_cuda && options_.backend == "gloo");
  const bool splits = device_backend_settings().split_groups;
  const auto make_accelerator = [&] {
    accelerator =
        make_device_backend({.store = store,
                             .group = name,
                             .rank = position,
                             .size = static_cast<int>(ranks.size()),
                             .device = device_of_rank(type, info_.local_rank),
                             .ranks_on_host = info_.local_size,
                             .host = backend,
                             .timeout = options_.timeout,
                             .split_from = splits ? impl_->split_parent({type, part ? all_ranks() : ranks}) : nullptr,
                             .split_color = part.value_or(0)});
  };
  try {
    if (accelerated && for_cuda) make_accelerator();  // first: fails at once in a build without NCCL
    backend = make_backend(name, store, ranks, position);
    if (accelerated && !for_cuda) make_accelerator();  // second: it may use the host's back-end
    if (accelerator) impl_->split_parents.try_emplace({type, ranks}, accelerator);
  } catch (const std::exception& error) {
    const auto* own = dynamic_cast<const Error*>(&error);
    if (own && own->kind() == ErrorKind::kConfig) throw;
    throw_group_error(fmt::format("[comm.new_group] group '{}' (rank {} of {})", name, position, ranks.size()), error,
                      *impl_->monitor);
  }
  const auto id = static_cast<uint32_t>(XXH3_64bits(key.data(), key.size()));
  std::shared_ptr<Group> group(
      new Group(name, ranks, position, backend,
                GroupContext{impl_->monitor, store, accelerator, id, accelerator ? type : c10::DeviceType::CPU}),
      GroupDeleter{impl_->monitor, impl_->self});
  impl_->monitor->recorder().add_group({.id = id, .name = name, .ranks = ranks});
  impl_->register_for_abort({backend, accelerator}, *group);
  if (accelerator && splits) make_communicator(*group, device_of_rank(type, info_.local_rank));
  return group;
}

std::shared_ptr<Group> new_group_like(const std::shared_ptr<Group>& group, const std::string& name) {
  const auto* made = std::get_deleter<GroupDeleter>(group);
  const auto world = made != nullptr ? made->world.lock() : nullptr;
  return world ? world->new_group(group->ranks(), name, group->context().accelerator_type) : group;
}

void World::abort() noexcept {
  const std::lock_guard lock(impl_->mutex);
  impl_->aborted = true;
  for (const auto& weak : impl_->backends) {
    try {
      const auto backend = weak.lock();
      if (!backend) continue;
      impl_->aborted_backends.push_back(
          backend);  // kept: its destructor may block, and must not run on the watchdog's thread
      backend->abort();
    } catch (...) {  // the connections were closed before
    }
  }
  impl_->monitor->end_messages();
}

}  // namespace tessera::comm
