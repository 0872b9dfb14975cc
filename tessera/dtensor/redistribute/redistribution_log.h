// RedistributionLog records every redistribution with the operation that caused it. ExplicitRedistribution forbids
// redistributions that the user did not request.
//
//   RedistributionLog log;
//   auto y = at::mm(a, b);                          // a is Shard(1), b Replicate
//   fmt::print("{}", log.to_string());              // aten::mm: self [8, 4] (S(1)) -> (R), 1 collectives, 64 bytes
//
//   ExplicitRedistribution only_mine;               // at::mm(a, b) is now an error that names the argument
//
// While an object of either class exists, it applies to the redistributions on its thread and in every backward that
// this thread runs. Objects may be nested: every RedistributionLog records, but only the innermost
// ExplicitRedistribution applies. With log level debug every redistribution is also logged.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/comm/group/context_value.h"
#include "tessera/dtensor/debug/comm_debug.h"
#include "tessera/dtensor/tensor/placement.h"

namespace tessera {

struct Redistribution {
  std::string cause;     // name of the operation, or "redistribute", "redistribute.backward" ...
  std::string argument;  // name of the argument, with the position in a list
  std::vector<int64_t> shape;
  Placements from;
  Placements to;
  bool is_explicit = false;  // by the user's redistribute, to_local, from_local or their backwards
  CommCounts comm_counts;    // collectives of this redistribution; for async_op those started so far
  std::string to_string() const;
};

class RedistributionLog {
 public:
  RedistributionLog();

  const std::vector<Redistribution>& records() const { return records_; }
  std::string to_string() const;  // one line for each record
  // Collectives and bytes of the redistributions, summed by operation. CommCounts::table() prints them.
  std::map<std::string, CommCounts> by_cause() const;
  void add(const Redistribution& record);

 private:
  std::mutex mutex_;
  std::vector<Redistribution> records_;
  comm::ContextValue in_force_;
};

// While an object of this class exists, an operation that has to redistribute an argument raises Error kShape, or logs
// a warning if `warn` is set. This is PyTorch's ExplicitRedistributionContext.
class ExplicitRedistribution {
 public:
  struct Options {
    bool enable = true;   // false: implicit redistributions are allowed again in this scope
    bool strict = false;  // also forbid redistributions without communication
    bool warn = false;    // log a warning instead
  };
  ExplicitRedistribution() : ExplicitRedistribution(Options{}) {}
  explicit ExplicitRedistribution(const Options& options);

  const Options& options() const { return options_; }

 private:
  Options options_;
  comm::ContextValue in_force_;
};

}  // namespace tessera
