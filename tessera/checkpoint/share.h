// What one rank contributes to a checkpoint: copies of its parts, and the file that holds them. Internal to checkpoint.
//
//   check_placements(tensors);
//   Share share = plan_share(tensors, objects, Writers(rank, holders, chosen));  // views
//   copy_share(share, pool, device_copies);                                      // from now on the tensors may change
//   std::string report = write_share(share, staged, rank);                       // what the metadata needs to know
//   add_report(contents, report);                                                // on rank 0, rank by rank
#pragma once

#include <c10/core/ScalarType.h>

#include <exception>
#include <filesystem>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/device_copies.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/snapshot_pool.h"
#include "tessera/checkpoint/writers.h"
#include "tessera/formats/torch/dcp_metadata.h"

namespace tessera {

struct Share {
  struct Chunk {
    std::vector<int64_t> offset;  // of the box in the global tensor
    at::Tensor data;              // the box: a view of the tensor, or its copy, contiguous, on the CPU
    bool is_copy = false;
  };
  struct Item {
    std::string name;
    c10::ScalarType dtype;
    std::vector<int64_t> shape;      // the global one
    std::vector<Chunk> chunks = {};  // none where another rank is to write them
    size_t same_as = kItself;        // position of the item that is the very same tensor under another name
  };
  static constexpr size_t kItself = SIZE_MAX;
  std::vector<Item> items;
  NamedObjects objects;  // those that this rank writes
};

// What a checkpoint will hold, as far as ranks have reported.
struct CheckpointContents {
  CheckpointContents();
  // The entry of a name, new where it was not asked for before; `path` is where it lies in the nested state dict.
  DcpEntry& entry_of(const std::string& name, const DcpPath& path);
  // One more box of a tensor's entry, and the record that holds it.
  void add_chunk(DcpEntry& entry, DcpChunk box, DcpStorageInfo place);
  // Checks the metadata and writes it into the folder, as one more of the files. Error kFormat, kIo.
  void publish_metadata(const std::filesystem::path& folder);

  std::vector<ManifestFile> files;
  DcpMetadata metadata;
  std::unordered_map<std::string, size_t> position = {};  // of a name in metadata.entries
};

// Where its path in the nested state dict is cut: torch knows "model" and "optim" as dicts of flat names.
DcpPath planner_path(const std::string& name);

// Error kShape for placements that cannot be saved.
void check_placements(const NamedTensors& tensors);
// What this rank writes, as views of the tensors.
Share plan_share(const NamedTensors& tensors, const NamedObjects& objects, Writers writers);
enum class CopyWhat { kAll, kWhatCannotWait };
// Puts copies in place of the views. kWhatCannotWait: only of what another thread could not copy later (tensors of a
// device, whose work is ordered by the caller's stream) or could not see changed (tensors made in inference mode).
// Copies of a device's tensors are on their way then, as `copies` says.
void copy_share(Share& share, SnapshotPool& pool, DeviceCopies& copies, CopyWhat what = CopyWhat::kAll);
// The copies go back to the pool they came from.
void give_back(const Share& share, SnapshotPool& pool);
// Writes the rank's file into `staged` and syncs it; the tensors of views must not change meanwhile. Errors are Error
// kIo or kFormat.
std::string write_share(const Share& share, const std::filesystem::path& staged, int rank);
// The report of a rank that has nothing else to report.
std::string failure_report(int rank, const std::exception& error);
// Error kIo for a failure, kFormat for what no rank writes, kShape for a tensor of which ranks report unlike shapes.
void add_report(CheckpointContents& contents, const std::string& report);

}  // namespace tessera
