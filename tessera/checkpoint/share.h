// What one rank contributes to a checkpoint: copies of its parts, and the file that holds them. Internal to checkpoint.
//
//   check_placements(tensors);
//   Share share = take_share(tensors, rank);
//   nlohmann::json report = write_share(share, staged, rank, size);      // what the manifest needs to know
//   add_report(manifest, report);                                        // on rank 0, rank by rank
#pragma once

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <utility>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/manifest.h"

namespace tessera {

struct Share {
  NamedTensors tensors;             // copies on the CPU
  std::vector<ManifestPart> parts;  // where each lies in its global tensor
  std::vector<std::pair<c10::ScalarType, std::vector<int64_t>>> globals;
};

// Error kShape, alike on all ranks, for placements that cannot be saved.
void check_placements(const NamedTensors& tensors);
// Replicas are the first rank's that holds them, plain tensors rank 0's.
Share take_share(const NamedTensors& tensors, int rank);
// Writes the rank's file into `staged` and syncs it. Errors are Error kIo or kFormat.
nlohmann::json write_share(const Share& share, const std::filesystem::path& staged, int rank, int size);
void add_report(Manifest& manifest, const nlohmann::json& report);

}  // namespace tessera
