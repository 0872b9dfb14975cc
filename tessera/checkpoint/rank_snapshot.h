// One rank's contribution to a checkpoint: the tensors and objects that it writes, and the file that holds them.
// Internal to checkpoint.
//
//   check_placements(tensors);
//   RankSnapshot snapshot = plan_snapshot(tensors, objects, WriterAssignment(rank, holders, chosen));  // views
//   copy_snapshot(snapshot, pool, device_copies);                 // now the tensors may change
//   std::string report = write_snapshot(snapshot, staged, rank);  // JSON for the metadata
//   add_report(contents, report);                                 // on rank 0, for each rank
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
#include "tessera/checkpoint/writer_assignment.h"
#include "tessera/formats/torch/dcp_metadata.h"

namespace tessera {

struct RankSnapshot {
  struct SnapshotChunk {
    std::vector<int64_t> offset;  // of the box in the global tensor
    at::Tensor data;              // the box: a view of the tensor, or a contiguous CPU copy
    bool is_copy = false;
  };
  struct SnapshotTensor {
    std::string name;
    c10::ScalarType dtype;
    std::vector<int64_t> shape;              // global shape
    std::vector<SnapshotChunk> chunks = {};  // empty when other ranks write the tensor
    size_t same_as = kNotTied;               // index of the tensor that is the same tensor under another name
  };
  static constexpr size_t kNotTied = SIZE_MAX;
  std::vector<SnapshotTensor> tensors;
  NamedObjects objects;  // the objects that this rank writes
};

// The contents of a checkpoint, as far as ranks have reported.
struct CheckpointContents {
  CheckpointContents();
  // The entry of a name, created at first use. `path` is the name's path in the nested state dict.
  DcpEntry& entry_of(const std::string& name, const DcpPath& path);
  // Adds a chunk to a tensor's entry, and the record that holds the chunk.
  void add_chunk(DcpEntry& entry, DcpChunk box, DcpStorageInfo place);
  // Checks the metadata, writes it into the folder and adds it to `files`. Errors kFormat, kIo.
  void publish_metadata(const std::filesystem::path& folder);

  std::vector<ManifestFile> files;
  DcpMetadata metadata;
  std::unordered_map<std::string, size_t> position = {};  // index in metadata.entries, by name
};

// The path of a name in the nested state dict: {"model", "a.weight"} for "model.a.weight".
DcpPath planner_path(const std::string& name);

// Error kShape for placements that cannot be saved.
void check_placements(const NamedTensors& tensors);
// Selects the tensors and objects that this rank writes, as views.
RankSnapshot plan_snapshot(const NamedTensors& tensors, const NamedObjects& objects, WriterAssignment assignment);
enum class SnapshotCopyMode { kAll, kOnlyUndeferrable };
// Replaces views by copies. kOnlyUndeferrable copies only tensors that the writer thread could not copy later (tensors
// of a device, whose work is ordered by the caller's stream) or whose changes could not be detected (tensors made in
// inference mode). Copies of a device's tensors are only launched: see `copies`.
void copy_snapshot(RankSnapshot& snapshot, SnapshotPool& pool, DeviceCopies& copies,
                   SnapshotCopyMode mode = SnapshotCopyMode::kAll);
// Returns the memory of the copies to the pool.
void recycle_memory(const RankSnapshot& snapshot, SnapshotPool& pool);
// Writes the rank's file into `staged` and syncs it. Tensors that are still views must not change during the call.
// Returns the report for rank 0. Errors kIo or kFormat.
std::string write_snapshot(const RankSnapshot& snapshot, const std::filesystem::path& staged, int rank);
// The report of a rank whose copy or file failed.
std::string failure_report(int rank, const std::exception& error);
// Adds a rank's report to the contents. Errors: kIo for a failure report, kFormat for an invalid report, kShape for a
// tensor whose dtype or shape differs between ranks.
void add_report(CheckpointContents& contents, const std::string& report);

}  // namespace tessera
