// Counts the collectives that DTensor operations start on this thread.
//
//   CommDebugMode count;
//   full_tensor(x);
//   EXPECT_EQ(count.all_gathers(), 1);
//
// One thread; may be nested, each counts what happens in its life.
#pragma once

#include <cstdint>

namespace tessera {

enum class CommKind : uint8_t { kAllGather, kAllReduce, kReduceScatter, kAllToAll, kBroadcast, kScatter, kCount };

class CommDebugMode {
 public:
  CommDebugMode();
  ~CommDebugMode();
  CommDebugMode(const CommDebugMode&) = delete;
  CommDebugMode& operator=(const CommDebugMode&) = delete;

  int64_t count(CommKind kind) const { return counts_[static_cast<int>(kind)]; }
  int64_t all_gathers() const { return count(CommKind::kAllGather); }
  int64_t all_reduces() const { return count(CommKind::kAllReduce); }
  int64_t reduce_scatters() const { return count(CommKind::kReduceScatter); }
  int64_t all_to_alls() const { return count(CommKind::kAllToAll); }
  int64_t total() const;
  // What the best algorithm brings to this rank from the others.
  int64_t total_bytes() const { return bytes_; }

  // Called for every collective that is started.
  static void record(CommKind kind, int64_t bytes = 0);

 private:
  int64_t counts_[static_cast<int>(CommKind::kCount)] = {};
  int64_t bytes_ = 0;
  CommDebugMode* outer_;
};

}  // namespace tessera
