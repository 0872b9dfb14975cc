#include "tessera/comm/backends/backend_choice.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/backends/gloo_backend.h"
#include "tessera/comm/backends/hierarchical_backend.h"
#include "tessera/comm/shm/handshake.h"

namespace tessera::comm {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

StorePtr part_of(const StorePtr& store, const std::string& name) {
  return c10::make_intrusive<c10d::PrefixStore>(name, store);
}

BackendPtr make_gloo(const StorePtr& store, const BackendRequest& request, int rank, int size) {
  return make_gloo_backend(store, {.rank = rank,
                                   .size = size,
                                   .loopback = request.one_host,
                                   .other_host = request.other_host,
                                   .timeout = request.timeout});
}

// Runs shm::shake_hands() with the settings of `request` among `ranks` (global ranks), and returns its result. `rank`
// is this rank's position in `ranks`.
shm::HandshakeResult shake_hands(const StorePtr& store, const BackendRequest& request, int rank,
                                 const std::vector<int>& ranks) {
  return shm::shake_hands(*store, {.rank = rank,
                                   .size = static_cast<int>(ranks.size()),
                                   .ranks = ranks,
                                   .oversubscribed = request.oversubscribed,
                                   .host = request.host,
                                   .timeout = request.timeout});
}

// Makes a mixed back-end (HierarchicalBackend). The first rank of each host writes to the store whether the ranks of
// its host share memory. Every rank reads the entries of all hosts, so all ranks decide the same. Returns null on all
// ranks when the ranks of some host cannot share memory; the first rank of that host logs a warning.
BackendPtr make_hierarchical(const StorePtr& store, const BackendRequest& request, const HostMap& hosts) {
  const int host = hosts.host_of(request.rank), place = hosts.place_of(request.rank);
  std::vector<int> ranks;
  for (const int rank : hosts.members(host)) ranks.push_back(request.ranks[rank]);
  const auto met = shake_hands(part_of(store, fmt::format("host{}", host)), request, place, ranks);
  const auto key_of = [](int each) { return fmt::format("mixed/{}", each); };
  if (place == 0) {
    store->set(key_of(host), met.backend ? "yes" : "no");
    if (!met.backend) {
      log_warning("[comm.new_group] group '{}' has no shared memory on this host: {}. It uses Gloo throughout.",
                  request.group, met.refusal);
    }
  }
  bool all = true;
  for (int each = 0; each < hosts.hosts(); ++each) all = all && store->get_to_str(key_of(each)) == "yes";
  if (!all) return nullptr;
  return c10::make_intrusive<HierarchicalBackend>(
      request.rank, hosts,
      HierarchicalGroups{.inner = met.backend,
                         .rail = make_gloo(part_of(store, fmt::format("rail{}", place)), request, host, hosts.hosts()),
                         .whole = make_gloo(part_of(store, "whole"), request, request.rank, request.size)});
}

}  // namespace

bool is_backend(std::string_view name) { return name == "auto" || name == "shm" || name == "gloo" || name == "nccl"; }

// Every branch depends only on values that are equal on all ranks of the group: the setting, and the handshake's
// result.
BackendPtr choose_backend(const StorePtr& store, const BackendRequest& request) {
  if (request.requested != "gloo") {
    const auto met = shake_hands(store, request, request.rank, request.ranks);
    if (met.backend) return met.backend;
    TESSERA_CHECK(request.requested != "shm", ErrorKind::kConfig,
                  "[comm.new_group] group '{}' has no shared memory: {}. Use comm.backend=auto or gloo.", request.group,
                  met.refusal);
    if (met.host_of.empty() && request.rank == 0) {
      log_warning("[comm.new_group] group '{}' has no shared memory: {}. It uses Gloo, which is slower.", request.group,
                  met.refusal);
    }
    const HostMap hosts(met.host_of);
    if (hosts.is_even()) {
      if (auto mixed = make_hierarchical(store, request, hosts)) return mixed;
    }
  }
  return make_gloo(store, request, request.rank, request.size);
}

}  // namespace tessera::comm
