// A cache of plans. The key of a call consists of the operation, the placements, shapes and dtypes of its tensors, and
// the values of all other arguments.
#pragma once

#include <c10/util/SmallVector.h>

#include <array>
#include <memory>
#include <unordered_map>
#include <vector>

#include "tessera/dtensor/dispatch/plan.h"

namespace tessera {

// The cache key of a call: a list of 64-bit words. The keys of two calls are equal exactly if the calls may use the
// same plan.
class CallKey {
 public:
  // Builds the key. Returns false when a plan for these arguments must not be cached.
  bool assign(const OpInfo& op, c10::ArrayRef<c10::IValue> args);
  uint64_t hash() const;
  c10::ArrayRef<uint64_t> words() const { return words_; }

 private:
  bool add(const c10::IValue& value);
  bool add(const at::Tensor& tensor);
  bool add_list(const c10::IValue& value);
  c10::SmallVector<uint64_t, 128> words_;
};

// The cached plans of one thread, at most kMaxPlans. There are two halves: when the young half is full, it becomes the
// old half and the former old half is dropped. A plan that is found in the old half moves to the young half. Lookups
// first try `recent_`, a small direct-mapped table of recent plans. A few words of the key give the position in this
// table, so a hit there needs no hash of the whole key.
class PlanCache {
 public:
  static constexpr size_t kMaxPlans = 8192;
  static PlanCache& of_this_thread();

  const std::shared_ptr<const Plan>* find_recent(c10::ArrayRef<uint64_t> words);
  const std::shared_ptr<const Plan>* find(uint64_t hash, c10::ArrayRef<uint64_t> words);
  void insert(uint64_t hash, c10::ArrayRef<uint64_t> words, std::shared_ptr<const Plan> plan);
  size_t size() const { return young_.size() + old_.size(); }
  uint64_t hits = 0;
  uint64_t misses = 0;  // look-ups without a hit; calls with uncacheable arguments are not counted

 private:
  struct CachedPlan {
    std::vector<uint64_t> words;
    std::shared_ptr<const Plan> plan;
  };
  struct SameHash {
    size_t operator()(uint64_t hash) const { return hash; }
  };
  using Map = std::unordered_multimap<uint64_t, CachedPlan, SameHash>;
  struct RecentPlan {
    uint64_t generation = 0;
    const CachedPlan* entry = nullptr;  // in the young half; valid only if `generation` is the current one
  };
  static Map::iterator lookup(Map& map, uint64_t hash, c10::ArrayRef<uint64_t> words);
  RecentPlan& recent_plan_of(c10::ArrayRef<uint64_t> words);
  const std::shared_ptr<const Plan>* add_to_recent(const CachedPlan& entry);
  void drop_old_half_if_full();
  Map young_;
  Map old_;
  uint64_t generation_ = 1;  // number of young halves so far; increments invalidate all recent plans
  std::array<RecentPlan, 256> recent_{};
};

}  // namespace tessera
