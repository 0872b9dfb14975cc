#include "tessera/comm/shm/handshake.h"

#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/error.h"
#include "tessera/base/machine/host.h"
#include "tessera/comm/shm/backend.h"
#include "tessera/comm/shm/shared_buffer.h"

namespace tessera::comm::shm {
namespace {

// The shared memory that ranks of this process have mapped. The key is the address of the MemoryServer that hands out
// the memory. Ranks that are threads of this process share one mapping.
class MappingRegistry {
 public:
  static MappingRegistry& instance() {
    static MappingRegistry registry;
    return registry;
  }
  // Returns the memory that an earlier get() with the same `address` returned, if this memory still exists; otherwise
  // calls make() and returns its result.
  template <class Make>
  std::shared_ptr<SharedMemory> get(const std::string& address, const Make& make) {
    const auto entry = entry_of(address);
    const std::lock_guard lock(entry->mutex);  // make() may wait: other groups must not wait for it
    auto memory = entry->memory.lock();
    if (!memory) entry->memory = memory = make();
    return memory;
  }

 private:
  struct Entry {
    std::mutex mutex;
    std::weak_ptr<SharedMemory> memory;
  };
  std::shared_ptr<Entry> entry_of(const std::string& address) {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const auto& item) {
      if (item.second.use_count() != 1) return false;
      // Only entries_ refers to this entry, so no other thread uses it. Its mutex is locked only so that the last
      // user's write to `memory` is visible here.
      const std::lock_guard nobody_waits(item.second->mutex);
      return item.second->memory.expired();
    });
    auto& entry = entries_[address];
    if (!entry) entry = std::make_shared<Entry>();
    return entry;
  }
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Entry>> entries_;
};

std::string key_of(const char* kind, int rank) { return fmt::format("shm/{}/{}", kind, rank); }

// The text that a rank publishes: a line with its identity, or "cannot: REASON", and a line with its process id.
std::string introduction(const std::string& host) {
  std::string identity;
  try {
    identity = memory_identity() + host;
  } catch (const std::exception& error) {
    identity = fmt::format("cannot: {}", error.what());
  }
  return fmt::format("{}\n{}", identity, ::getpid());
}

struct RankIdentity {
  std::string identity;
  pid_t process = 0;
};

RankIdentity parse(const std::string& text) {
  const size_t line = text.find('\n');
  TESSERA_CHECK(line != text.npos, ErrorKind::kInternal, "[comm.shm] introduction '{}'", text);
  return {text.substr(0, line), static_cast<pid_t>(std::stol(text.substr(line + 1)))};
}

// Index of each rank's host. Hosts are numbered from 0 in the order of their first rank.
std::vector<int> hosts_of(const std::vector<RankIdentity>& ranks) {
  std::map<std::string, int> numbers;
  std::vector<int> hosts;
  for (const auto& rank : ranks) {
    hosts.push_back(numbers.try_emplace(rank.identity, static_cast<int>(numbers.size())).first->second);
  }
  return hosts;
}

// How the texts under the store's keys shm/offer, shm/took/R and shm/verdict begin. kYes: the memory can be shared
// (shm/offer, shm/verdict), or rank R has mapped it (shm/took/R). kViews: as kYes, and rank R (shm/took/R) or every
// rank (shm/verdict) may also open the shared buffers of the other ranks. kElsewhere (shm/offer): some ranks are on
// another host, in another container or of another user than rank 0. kNo: the memory cannot be shared for another
// reason.
constexpr const char* kYes = "yes\n";
constexpr const char* kViews = "yes\nviews";
constexpr const char* kElsewhere = "elsewhere\n";
constexpr const char* kNo = "no\n";

// Keys of the store, in the order in which they are written:
//   shm/is/R       each rank: introduction()
//   shm/offer      rank 0: the address of its MemoryServer and the process ids of all ranks, or why the ranks
//                  cannot share memory
//   shm/refused    a rank that could not map the memory; the key ends MemoryServer::hand_out() on rank 0
//   shm/took/R     each rank but 0: kYes or kViews if it has mapped the memory, otherwise kNo with the reason
//   shm/verdict    rank 0: kYes or kViews if all ranks have mapped the memory, otherwise kNo with the reason
// Every rank decides by shm/offer and shm/verdict alone, so all ranks choose the same back-end.
class Handshake {
 public:
  Handshake(c10d::Store& store, const HandshakeOptions& options)
      : store_(store), options_(options), deadline_(Clock::now() + options.timeout) {}

  HandshakeResult run() {
    store_.set(key_of("is", options_.rank), introduction(options_.host));
    if (options_.rank == 0) host();
    const std::string answer = store_.get_to_str("shm/offer");
    if (!answer.starts_with(kYes)) return refused(answer);
    const MemoryOffer offer = parse_offer(answer);
    if (options_.rank != 0) fetch(offer);
    if (options_.rank == 0) store_.set("shm/verdict", decide_for_all());
    const std::string decision = store_.get_to_str("shm/verdict");
    if (!decision.starts_with(kYes)) return refused(decision);
    ChannelOptions channel{.rank = options_.rank,
                           .size = options_.size,
                           .ranks = options_.ranks,
                           .processes = offer.processes,
                           .oversubscribed = options_.oversubscribed,
                           .views = decision == kViews};
    return {
        .backend = c10::make_intrusive<ShmBackend>(memory_, channel, options_.timeout), .refusal = "", .host_of = {}};
  }

 private:
  // Parses the text of shm/offer or shm/verdict when the ranks cannot share memory: "no\nREASON", or
  // "elsewhere\nREASON\n0 0 1 1" when the ranks are on different hosts, in different containers or of different users.
  // The numbers are the host index of each rank.
  static HandshakeResult refused(const std::string& answer) {
    std::istringstream lines(answer.substr(answer.find('\n') + 1));
    HandshakeResult met;
    std::getline(lines, met.refusal);
    if (answer.starts_with(kElsewhere)) {
      for (int host = 0; lines >> host;) met.host_of.push_back(host);
    }
    return met;
  }
  // Rank 0's offer of shared memory. Its text is "yes\nADDRESS 4711 4712": the address of the MemoryServer that hands
  // out the memory, and the process id of each rank.
  struct MemoryOffer {
    std::string address;
    std::vector<pid_t> processes;
  };
  static MemoryOffer parse_offer(const std::string& answer) {
    std::istringstream words(answer.substr(std::string(kYes).size()));
    MemoryOffer offer;
    words >> offer.address;
    for (pid_t process; words >> process;) offer.processes.push_back(process);
    return offer;
  }

  // Rank 0: compares the identities of all ranks, creates the shared memory, and sets the store's key "shm/offer" to a
  // MemoryOffer, or to the reason why the ranks cannot share memory.
  void host() {
    std::vector<RankIdentity> ranks;
    for (int rank = 0; rank < options_.size; ++rank) ranks.push_back(parse(store_.get_to_str(key_of("is", rank))));
    const std::string& own = ranks[0].identity;
    for (int rank = 0; rank < options_.size; ++rank) {
      const std::string& identity = ranks[rank].identity;
      if (identity.starts_with("cannot")) {
        return store_.set("shm/offer", fmt::format("{}rank {} {}", kNo, rank, identity));
      }
    }
    const auto stranger = std::ranges::find_if(ranks, [&](const RankIdentity& other) { return other.identity != own; });
    if (stranger != ranks.end()) {
      return store_.set("shm/offer",
                        fmt::format("{}ranks 0 and {} are on different hosts, in different containers or of "
                                    "different users\n{}",
                                    kElsewhere, stranger - ranks.begin(), fmt::join(hosts_of(ranks), " ")));
    }
    if (options_.size > kMaxRanks) {
      return store_.set("shm/offer", fmt::format("{}{} ranks, {} at most", kNo, options_.size, kMaxRanks));
    }
    std::string offer;
    try {
      memory_ = SharedMemory::create(Layout(options_.size).bytes());
      initialize(*memory_, options_.size);
      server_.emplace();
      offer = kYes + server_->address();
    } catch (const Error& error) {
      return store_.set("shm/offer", kNo + std::string(error.what()));
    }
    for (const auto& rank : ranks) {
      offer += fmt::format(" {}", rank.process);
      if (rank.process != ranks[0].process) others_.insert(rank.process);
    }
    MappingRegistry::instance().get(server_->address(), [&] { return memory_; });
    store_.set("shm/offer", offer);
  }

  // Called by ranks other than 0. Maps the shared memory of rank 0 and sets the key shm/took/R of the store (R: this
  // rank): to kNo with the reason if the memory cannot be mapped; otherwise to kViews if this rank may open the shared
  // buffers of all processes in `offer`, else to kYes.
  void fetch(const MemoryOffer& offer) {
    std::string outcome = may_view_all(offer.processes) ? kViews : kYes;
    try {
      memory_ = MappingRegistry::instance().get(offer.address, [&] {
        return std::shared_ptr<SharedMemory>(
            SharedMemory::receive(offer.address, Layout(options_.size).bytes(), deadline_));
      });
    } catch (const std::exception& error) {
      outcome = fmt::format("{}rank {}: {}", kNo, options_.rank, error.what());
      store_.set("shm/refused", outcome);  // rank 0 must not wait for this rank in hand_out()
    }
    store_.set(key_of("took", options_.rank), outcome);
  }

  // Rank 0: sends the descriptor of the shared memory to the other processes and reads the outcomes of all other ranks
  // (shm/took/R). Returns the text for shm/verdict: kNo with the reason if sending failed or a rank has not mapped the
  // memory; otherwise kViews if every rank may also open the shared buffers of the others, else kYes.
  std::string decide_for_all() {
    std::string trouble;
    try {
      server_->hand_out(*memory_, static_cast<int>(others_.size()), deadline_, [&] {
        if (store_.check({"shm/refused"})) raise(ErrorKind::kIo, "refused");
        check_processes();
      });
    } catch (const Error& error) {
      trouble = error.what();
    }
    server_.reset();  // ends the connections of ranks that still wait
    bool views = may_view_all({others_.begin(), others_.end()});
    for (int rank = 1; rank < options_.size; ++rank) {
      std::string outcome = store_.get_to_str(key_of("took", rank));
      if (!outcome.starts_with(kYes)) return outcome;
      views = views && outcome == kViews;
    }
    if (!trouble.empty()) return kNo + trouble;
    return views ? kViews : kYes;
  }

  static bool may_view_all(const std::vector<pid_t>& processes) {
    return std::ranges::all_of(processes, can_open_buffers);
  }

  void check_processes() const {
    for (const pid_t process : others_) {
      if (::kill(process, 0) != 0 && errno == ESRCH) throw PeerFailed(fmt::format("process {} has ended", process));
    }
  }

  c10d::Store& store_;
  const HandshakeOptions& options_;
  Clock::time_point deadline_;
  std::shared_ptr<SharedMemory> memory_;
  std::optional<MemoryServer> server_;
  std::set<pid_t> others_;
};

}  // namespace

HandshakeResult shake_hands(c10d::Store& store, const HandshakeOptions& options) {
  return Handshake(store, options).run();
}

std::string why_unavailable() {
  try {
    memory_identity();
    const auto memory = SharedMemory::create(Layout(2).bytes());
    const MemoryServer server;
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace tessera::comm::shm
