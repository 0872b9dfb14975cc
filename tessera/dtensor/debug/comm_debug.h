// Counts the collectives that this thread starts, or a backward that it runs, and their bytes: in all, by kind and by
// module.
//
//   CommDebugMode count;
//   ModuleTrace trace(*model);               // parallel/modules/module_trace.h: names the modules
//   (*model)(batch).sum().backward();
//   EXPECT_EQ(count.all_gathers(), 1);
//   fmt::print("{}", count.table());
//
// Every collective of comm/collectives/ on more than one rank counts, whoever starts it: DTensors, fully_shard, the
// user. Made, read and ended on one thread; may be nested, each counts what happens in its life. No communication of
// its own.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "tessera/comm/group/observer.h"

namespace tessera {

using CommKind = comm::Op;

// Collectives and bytes by kind; comm/group/observer.h says what bytes count.
struct CommTally {
  int64_t counts[comm::kOpCount] = {};
  int64_t bytes[comm::kOpCount] = {};
  int64_t total() const;
  int64_t total_bytes() const;
  CommTally& operator+=(const CommTally& other);
  // A line for all under this name and one for each kind that occurs.
  std::string table(const std::string& name) const;
};

class CommDebugMode final : private comm::CollectiveObserver {
 public:
  CommDebugMode() = default;

  int64_t count(CommKind kind) const { return all_.counts[static_cast<int>(kind)]; }
  int64_t bytes(CommKind kind) const { return all_.bytes[static_cast<int>(kind)]; }
  int64_t all_gathers() const { return count(CommKind::kAllGather); }
  int64_t all_reduces() const { return count(CommKind::kAllReduce); }
  int64_t reduce_scatters() const { return count(CommKind::kReduceScatter); }
  int64_t all_to_alls() const { return count(CommKind::kAllToAll); }
  const CommTally& tally() const { return all_; }
  int64_t total() const { return all_.total(); }
  int64_t total_bytes() const { return all_.total_bytes(); }
  // What happened inside each named module, those it contains included. Backwards have names of their own.
  const std::map<std::string, CommTally>& by_module() const { return by_module_; }
  // All of it as text, a line for each module and kind. By operation: RedistributionLog::by_cause().
  std::string table() const;
  // The same for programs: {"Global": {"all_gather": {"count": 1, "bytes": 96}}, "modules": {"layers.0": {...}}}.
  std::string json() const;

  // What this thread works on from now on, beside what it has entered and not left; for those who know modules.
  static void enter_module(const std::string& name);
  // The last one of that name, in any order (backwards are not nested); nothing when there is none.
  static void leave_module(const std::string& name);

 private:
  void on_collective(CommKind kind, int64_t bytes, const comm::Group& group) override;
  std::mutex mutex_;
  CommTally all_;
  std::map<std::string, CommTally> by_module_;
};

}  // namespace tessera
