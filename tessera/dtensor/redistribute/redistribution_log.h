// Why tensors move: a record of every redistribution, and a way to forbid those that nobody asked for.
//
//   RedistributionLog log;
//   auto y = at::mm(a, b);                          // a is Shard(1), b Replicate
//   fmt::print("{}", log.to_string());              // aten::mm: self [8, 4] (S(1)) -> (R), 1 collective, 64 bytes
//
//   ExplicitRedistribution only_mine;               // at::mm(a, b) is now an error that names the argument
//
// Both watch their thread while they live, and backwards that it runs, and may be nested; the innermost
// ExplicitRedistribution counts. With the log level debug every redistribution is also logged.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/comm/group/propagated.h"
#include "tessera/dtensor/debug/comm_debug.h"
#include "tessera/dtensor/tensor/placement.h"

namespace tessera {

struct Redistribution {
  std::string cause;     // the operation, or "redistribute", "redistribute.backward" ...
  std::string argument;  // its name; with the position in a list
  std::vector<int64_t> shape;
  Placements from;
  Placements to;
  bool asked_for = false;  // by the user's redistribute, to_local, from_local or their backwards
  CommTally moved;         // what it took; of an asynchronous one what it started
  std::string to_string() const;
};

class RedistributionLog {
 public:
  RedistributionLog();

  const std::vector<Redistribution>& records() const { return records_; }
  std::string to_string() const;  // a line each
  // What the redistributions of each operation took, in all. CommTally::table() makes lines of it.
  std::map<std::string, CommTally> by_cause() const;
  void add(const Redistribution& record);

 private:
  std::mutex mutex_;
  std::vector<Redistribution> records_;
  comm::Propagated in_force_;
};

// While one lives, an operation that would have to redistribute an argument is an Error kShape (or a warning).
// Upstream's ExplicitRedistributionContext.
class ExplicitRedistribution {
 public:
  struct Options {
    bool enable = true;   // false: allowed again inside
    bool strict = false;  // also those that move nothing
    bool warn = false;    // log a warning instead
  };
  ExplicitRedistribution() : ExplicitRedistribution(Options{}) {}
  explicit ExplicitRedistribution(const Options& options);

  const Options& options() const { return options_; }

 private:
  Options options_;
  comm::Propagated in_force_;
};

}  // namespace tessera
