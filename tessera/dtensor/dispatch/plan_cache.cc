#include "tessera/dtensor/dispatch/plan_cache.h"

#include <bit>
#include <cstring>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

// In the key each argument begins with a word whose low byte is a Tag, so that arguments of different kinds never give
// equal keys.
enum class Tag : uint8_t {
  kUndefined = 1,
  kDTensor,
  kPlain,
  kNone,
  kInt,
  kDouble,
  kBool,
  kComplex,
  kString,
  kDevice,
  kList
};

constexpr uint64_t word(Tag tag, uint64_t payload = 0) { return static_cast<uint64_t>(tag) | payload << 8; }

// The properties of a tensor that plans depend on, packed into one word: number of dims, dtype, device type,
// contiguity, and whether it is a wrapped number (which has less weight in type promotion).
uint64_t describe(const at::TensorBase& tensor, const c10::TensorImpl& impl, bool contiguous) {
  return static_cast<uint64_t>(impl.dim()) | static_cast<uint64_t>(tensor.scalar_type()) << 8 |
         static_cast<uint64_t>(static_cast<uint8_t>(tensor.device().type())) << 16 |
         static_cast<uint64_t>(contiguous) << 24 | static_cast<uint64_t>(impl.is_wrapped_number()) << 25;
}

}  // namespace

bool CallKey::add(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    words_.push_back(word(Tag::kUndefined));
    return true;
  }
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const auto sizes = impl.sizes();
  if (!is_dtensor_impl(impl)) {
    words_.push_back(word(Tag::kPlain, describe(tensor, impl, true)));
    words_.append(sizes.begin(), sizes.end());
    // A plain tensor with several elements is accepted without ImplicitReplication only if a comparison finds equal
    // values on all ranks (check_plain in plan.cc). This depends on the values, so the plan is not cached.
    return impl.numel() == 1 || implicit_replication_enabled();
  }
  const auto& dtensor = static_cast<const DTensorImpl&>(impl);
  const bool contiguous = impl.is_contiguous();
  words_.push_back(word(Tag::kDTensor, describe(tensor, impl, contiguous)));
  words_.push_back(dtensor.mesh()->id());
  const auto& placements = dtensor.shared_placements()->words;
  words_.append(placements.begin(), placements.end());
  words_.append(sizes.begin(), sizes.end());
  if (!contiguous) {
    const auto strides = impl.strides();
    words_.append(strides.begin(), strides.end());
  }
  return true;
}

bool CallKey::add_list(const c10::IValue& value) {
  const auto elements = value.toListRef();
  words_.push_back(word(Tag::kList, elements.size()));
  bool cacheable = true;
  for (const auto& element : elements) cacheable = add(element) && cacheable;
  return cacheable;
}

bool CallKey::add(const c10::IValue& value) {
  if (value.isTensor()) return add(value.toTensor());
  if (value.isNone()) {
    words_.push_back(word(Tag::kNone));
  } else if (value.isInt()) {
    words_.push_back(word(Tag::kInt));
    words_.push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    words_.push_back(word(Tag::kBool, value.toBool()));
  } else if (value.isDouble()) {
    words_.push_back(word(Tag::kDouble));
    words_.push_back(std::bit_cast<uint64_t>(value.toDouble()));
  } else if (value.isList()) {
    return add_list(value);
  } else if (value.isComplexDouble()) {
    const auto complex = value.toComplexDouble();
    words_.push_back(word(Tag::kComplex));
    words_.push_back(std::bit_cast<uint64_t>(complex.real()));
    words_.push_back(std::bit_cast<uint64_t>(complex.imag()));
  } else if (value.isDevice()) {
    const c10::Device device = value.toDevice();
    words_.push_back(word(Tag::kDevice, static_cast<uint8_t>(device.type()) |
                                            static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 8));
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    words_.push_back(word(Tag::kString, text.size()));
    for (size_t i = 0; i < text.size(); i += 8) {
      uint64_t piece = 0;
      std::memcpy(&piece, text.data() + i, std::min<size_t>(8, text.size() - i));
      words_.push_back(piece);
    }
  } else {
    return false;  // generators, storages, streams
  }
  return true;
}

bool CallKey::assign(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  words_.clear();
  words_.push_back(op.id);
  bool cacheable = true;
  for (const auto& arg : args) cacheable = add(arg) && cacheable;
  return cacheable;
}

// Mixes all words of the key. Two keys may have the same hash; lookup() then compares all words.
uint64_t CallKey::hash() const {
  uint64_t hash = 0x9e3779b97f4a7c15ULL;
  for (const uint64_t piece : words_) hash = std::rotl(hash ^ piece, 23) * 0xff51afd7ed558ccdULL;
  return hash ^ hash >> 32;
}

PlanCache& PlanCache::of_this_thread() {
  static thread_local PlanCache cache;
  return cache;
}

PlanCache::Map::iterator PlanCache::lookup(Map& map, uint64_t hash, c10::ArrayRef<uint64_t> words) {
  auto [at, end] = map.equal_range(hash);
  for (; at != end; ++at) {
    if (words.equals(at->second.words)) return at;
  }
  return map.end();
}

PlanCache::RecentPlan& PlanCache::recent_plan_of(c10::ArrayRef<uint64_t> words) {
  // The position in recent_ depends on the operation's id, a word in the middle of the key (usually a size), the last
  // word and the number of words.
  const uint64_t mixed = words.front() + (words[words.size() / 2] << 17) + (words.back() << 34) + words.size();
  return recent_[mixed * 0x9e3779b97f4a7c15ULL >> 56];
}

const std::shared_ptr<const Plan>* PlanCache::add_to_recent(const CachedPlan& entry) {
  recent_plan_of(entry.words) = {generation_, &entry};
  return &entry.plan;
}

const std::shared_ptr<const Plan>* PlanCache::find_recent(c10::ArrayRef<uint64_t> words) {
  const RecentPlan& recent = recent_plan_of(words);
  if (recent.generation != generation_ || !words.equals(recent.entry->words)) return nullptr;
  ++hits;
  return &recent.entry->plan;
}

// A plan that is found in the old half moves to the young half, so plans in use survive when the old half is dropped.
// The node is extracted first, because drop_old_half_if_full() may drop the old half.
const std::shared_ptr<const Plan>* PlanCache::find(uint64_t hash, c10::ArrayRef<uint64_t> words) {
  if (const auto at = lookup(young_, hash, words); at != young_.end()) {
    ++hits;
    return add_to_recent(at->second);
  }
  if (const auto at = lookup(old_, hash, words); at != old_.end()) {
    ++hits;
    auto node = old_.extract(at);
    drop_old_half_if_full();
    return add_to_recent(young_.insert(std::move(node))->second);
  }
  ++misses;
  return nullptr;
}

void PlanCache::drop_old_half_if_full() {
  if (young_.size() >= kMaxPlans / 2) {
    old_ = std::move(young_);
    young_ = {};
    ++generation_;
  }
}

void PlanCache::insert(uint64_t hash, c10::ArrayRef<uint64_t> words, std::shared_ptr<const Plan> plan) {
  drop_old_half_if_full();
  add_to_recent(young_.emplace(hash, CachedPlan{words.vec(), std::move(plan)})->second);
}

}  // namespace tessera
