// Plans by the whole description of a call: operation, placements, shapes, dtypes and all other arguments by value.
#pragma once

#include <c10/util/SmallVector.h>

#include <array>
#include <memory>
#include <unordered_map>
#include <vector>

#include "tessera/dtensor/dispatch/plan.h"

namespace tessera {

// Words that are equal exactly for calls that may share a plan.
class CallKey {
 public:
  // False when the arguments hold something that a plan must not be kept for.
  bool assign(const OpEntry& op, c10::ArrayRef<c10::IValue> args);
  uint64_t hash() const;
  c10::ArrayRef<uint64_t> words() const { return words_; }

 private:
  bool add(const c10::IValue& value);
  bool add(const at::Tensor& tensor);
  bool add_list(const c10::IValue& value);
  c10::SmallVector<uint64_t, 128> words_;
};

// One thread's plans. Holds at most kMaxPlans: when the young half is full, it becomes the old half and the old half
// goes; what is used in the old half moves to the young one. The plans of the last calls are found without a hash of
// all words, in slots that a few of them choose.
class PlanCache {
 public:
  static constexpr size_t kMaxPlans = 8192;
  static PlanCache& of_this_thread();

  const std::shared_ptr<const Plan>* find_recent(c10::ArrayRef<uint64_t> words);
  const std::shared_ptr<const Plan>* find(uint64_t hash, c10::ArrayRef<uint64_t> words);
  void insert(uint64_t hash, c10::ArrayRef<uint64_t> words, std::shared_ptr<const Plan> plan);
  size_t size() const { return young_.size() + old_.size(); }
  uint64_t hits = 0;
  uint64_t misses = 0;  // a plan was made; calls whose plan holds for them only are in neither

 private:
  struct Entry {
    std::vector<uint64_t> words;
    std::shared_ptr<const Plan> plan;
  };
  struct SameHash {
    size_t operator()(uint64_t hash) const { return hash; }
  };
  using Map = std::unordered_multimap<uint64_t, Entry, SameHash>;
  struct Slot {
    uint64_t turn = 0;
    const Entry* entry = nullptr;  // in the young half, while this is its turn
  };
  static Map::iterator lookup(Map& map, uint64_t hash, c10::ArrayRef<uint64_t> words);
  Slot& slot_of(c10::ArrayRef<uint64_t> words);
  const std::shared_ptr<const Plan>* remember(const Entry& entry);
  void make_room();
  Map young_;
  Map old_;
  uint64_t turn_ = 1;  // counts young halves
  std::array<Slot, 256> recent_{};
};

}  // namespace tessera
