// Counts the collectives, and their bytes, that this thread starts or that a backward run by this thread starts. The
// counts are kept in total, by kind and by module.
//
//   CommDebugMode count;
//   ModuleTrace trace(*model);               // parallel/modules/module_trace.h: names the modules
//   (*model)(batch).sum().backward();
//   EXPECT_EQ(count.all_gathers(), 1);
//   fmt::print("{}", count.table());
//
// Every collective of comm/collectives/ on more than one rank is counted, for example from DTensor operations,
// fully_shard or the user's own code. An object is created, read and destroyed on one thread. Objects may be nested;
// each counts the collectives that start while it exists. The object itself does not communicate.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "tessera/comm/group/observer.h"

namespace tessera {

using CommKind = comm::Op;

// The number of collectives and their bytes, indexed by comm::Op. comm/group/observer.h defines the bytes of a
// collective.
struct CommCounts {
  int64_t counts[comm::kOpCount] = {};
  int64_t bytes[comm::kOpCount] = {};
  int64_t total() const;
  int64_t total_bytes() const;
  CommCounts& operator+=(const CommCounts& other);
  // Returns a text: a line with `name` and the totals, then one line for each kind of collective that was counted.
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
  const CommCounts& comm_counts() const { return all_; }
  int64_t total() const { return all_.total(); }
  int64_t total_bytes() const { return all_.total_bytes(); }
  // Counts of the collectives that ran inside each named module or its submodules. ModuleTrace gives a module's
  // backward a separate name, such as "model.layers.0 (backward)".
  const std::map<std::string, CommCounts>& by_module() const { return by_module_; }
  // All counts as text, one line for each module and kind. For counts by operation see RedistributionLog::by_cause().
  std::string table() const;
  // All counts as JSON: {"Global": {"all_gather": {"count": 1, "bytes": 96}}, "modules": {"layers.0": {...}}}.
  std::string json() const;

  // Adds `name` to this thread's list of running modules. ModuleTrace calls this function from module hooks.
  static void enter_module(const std::string& name);
  // Removes the last entry `name` from this thread's list of running modules. This entry need not be at the end of the
  // list, because the backwards of two modules may overlap. Does nothing if the list does not contain `name`.
  static void leave_module(const std::string& name);

 private:
  void on_collective(CommKind kind, int64_t bytes, const comm::Group& group) override;
  std::mutex mutex_;
  CommCounts all_;
  std::map<std::string, CommCounts> by_module_;
};

}  // namespace tessera
