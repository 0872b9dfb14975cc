#include "tessera/dtensor/tensor/placement.h"

#include <fmt/format.h>

namespace tessera {

std::string to_string(const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::kReplicate:
      return "R";
    case Placement::Kind::kShard:
      return fmt::format("S({})", placement.dim);
    case Placement::Kind::kStridedShard:
      return fmt::format("_S({}, {})", placement.dim, placement.split_factor);
    case Placement::Kind::kPartial:
      return fmt::format("P({})", comm::to_string(placement.reduce_op));
    case Placement::Kind::kNormPartial:
      return fmt::format("_NormP({})", placement.norm_order());
  }
  return "?";
}

std::string to_string(const Placements& placements) {
  std::string text = "(";
  for (size_t i = 0; i < placements.size(); ++i) text += (i == 0 ? "" : ", ") + to_string(placements[i]);
  return text + ")";
}

}  // namespace tessera
