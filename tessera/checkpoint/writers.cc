#include "tessera/checkpoint/writers.h"

#include <algorithm>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {
namespace {

constexpr int64_t kRecordBytes = 1024;  // what a record takes beside its data, so that small ones are spread too

}  // namespace

Writers::Writers(int rank, const std::vector<int>& holders)
    : rank_(rank), first_(*std::min_element(holders.begin(), holders.end())) {
  for (const int holder : holders) bytes_[holder] = 0;
}

bool Writers::write_here(const at::TensorBase& tensor) {
  if (is_dtensor(tensor)) return write_part(tensor);
  return write_plain(static_cast<int64_t>(tensor.nbytes()) + kRecordBytes);
}

bool Writers::write_plain(int64_t bytes) {
  const auto least =
      std::min_element(bytes_.begin(), bytes_.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  least->second += bytes;
  return least->first == rank_;
}

bool Writers::write_part(const at::TensorBase& tensor) {
  const auto& mesh = *device_mesh(tensor);
  const auto& ranks = mesh.ranks();
  const auto& how = placements(tensor);
  const auto is_replica = [&](size_t dim) { return how[dim].is_replicate(); };
  const bool known_to_all = ranks.size() == bytes_.size() &&
                            std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return bytes_.contains(rank); });
  if (!known_to_all) {
    if (!mesh.coordinate() || std::find(ranks.begin(), ranks.end(), first_) == ranks.end()) return false;
    for (size_t dim = 0; dim < how.size(); ++dim) {
      if (is_replica(dim) && (*mesh.coordinate())[dim] != 0) return false;
    }
    return true;
  }
  // Ranks whose coordinates differ in replicated dims only hold the same part.
  int64_t parts = 1;
  std::vector<int64_t> stride(how.size(), 0);  // of a coordinate in the number of its part
  for (size_t dim = how.size(); dim-- > 0;) {
    if (is_replica(dim)) continue;
    stride[dim] = parts;
    parts *= mesh.size(static_cast<int64_t>(dim));
  }
  std::vector<std::map<int, int64_t>::value_type*> writer(static_cast<size_t>(parts), nullptr);
  for (size_t at = 0; at < ranks.size(); ++at) {
    int64_t part = 0, rest = static_cast<int64_t>(at);  // ranks lie in row-major order of their coordinates
    for (size_t dim = how.size(); dim-- > 0;) {
      part += rest % mesh.size(static_cast<int64_t>(dim)) * stride[dim];
      rest /= mesh.size(static_cast<int64_t>(dim));
    }
    auto*& chosen = writer[static_cast<size_t>(part)];
    auto& candidate = *bytes_.find(ranks[at]);
    if (!chosen || candidate.second < chosen->second ||
        (candidate.second == chosen->second && candidate.first < chosen->first)) {
      chosen = &candidate;
    }
  }
  const int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size()) / parts + kRecordBytes;
  bool here = false;
  for (auto* chosen : writer) {
    chosen->second += bytes;
    here = here || chosen->first == rank_;
  }
  return here;
}

}  // namespace tessera
