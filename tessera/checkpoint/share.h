// What one rank contributes to a checkpoint: copies of its parts, and the file that holds them. Internal to checkpoint.
//
//   check_placements(tensors);
//   Share share = take_share(tensors, rank, 0);
//   std::string report = write_share(share, staged, rank, size);         // what the manifest needs to know
//   add_report(manifest, report);                                        // on rank 0, rank by rank
#pragma once

#include <c10/core/ScalarType.h>

#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/manifest.h"

namespace tessera {

struct Share {
  struct Origin {
    std::string name;
    c10::ScalarType dtype;
    std::vector<int64_t> shape;            // the global one
    std::vector<ManifestPart> parts = {};  // their `file` is not known yet
  };
  NamedTensors tensors;         // what the rank writes: local parts, copies on the CPU
  std::vector<Origin> origins;  // of every tensor that it has, without parts where another rank is to write them
};

// Error kShape, alike on all ranks, for placements that cannot be saved.
void check_placements(const NamedTensors& tensors);
// Replicas are the first rank's that holds them; first_holder as in CheckpointOptions.
Share take_share(const NamedTensors& tensors, int rank, int first_holder);
// Writes the rank's file into `staged` and syncs it. Errors are Error kIo or kFormat.
std::string write_share(const Share& share, const std::filesystem::path& staged, int rank, int size);
// The report of a rank that has nothing else to report.
std::string failure_report(int rank, const std::exception& error);
// Error kIo for a failure, kFormat for what no rank writes, kShape for a tensor of which ranks report unlike shapes.
void add_report(Manifest& manifest, const std::string& report);

}  // namespace tessera
