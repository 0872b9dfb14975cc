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

// The files and metadata of a checkpoint, collected from the reports of the ranks by add_report().
struct CheckpointContents {
  CheckpointContents();
  // Returns the metadata entry of a name, and creates it at the first call. `path` is the name's path in the nested
  // state dict.
  DcpEntry& entry_of(const std::string& name, const DcpPath& path);
  // Adds a chunk to a tensor's entry. `place` is the file and record that hold the chunk.
  void add_chunk(DcpEntry& entry, DcpChunk box, DcpStorageInfo place);
  // Checks the metadata, writes it into the folder and adds it to `files`. Errors kFormat, kIo.
  void publish_metadata(const std::filesystem::path& folder);

  std::vector<ManifestFile> files;
  DcpMetadata metadata;
  std::unordered_map<std::string, size_t> position = {};  // index in metadata.entries, by name
};

// The path of a name in the nested state dict: {"model", "a.weight"} for "model.a.weight".
DcpPath planner_path(const std::string& name);

// Checks that all placements of the tensors can be saved. Error kShape for a Partial placement.
void check_placements(const NamedTensors& tensors);
// Selects the chunks of tensors and the objects that this rank writes. The chunks are views of `tensors`.
RankSnapshot plan_snapshot(const NamedTensors& tensors, const NamedObjects& objects, WriterAssignment assignment);
enum class SnapshotCopyMode { kAll, kOnlyUndeferrable };
// Replaces each chunk of `snapshot` that is a view of the caller's tensor by a copy. kOnlyUndeferrable copies only the
// chunks of two kinds of tensors: tensors of an accelerator, because their copy must be ordered after the work on the
// caller's stream, and tensors made in inference mode, because SnapshotGate cannot detect their changes. The writer
// thread can copy all others later. Copies of an accelerator's tensors are only launched; `copies` waits for them.
void copy_snapshot(RankSnapshot& snapshot, SnapshotPool& pool, DeviceCopies& copies,
                   SnapshotCopyMode mode = SnapshotCopyMode::kAll);
// Returns the memory of the copies to the pool.
void recycle_memory(const RankSnapshot& snapshot, SnapshotPool& pool);
// Writes this rank's file to the path `staged` and syncs it. If `snapshot` holds views of tensors in place of copies,
// these tensors must not change before the function returns. Returns the report for rank 0. Errors kIo or kFormat.
std::string write_snapshot(const RankSnapshot& snapshot, const std::filesystem::path& staged, int rank);
// The report of a rank whose copy or file failed.
std::string failure_report(int rank, const std::exception& error);
// Adds one rank's report, the text that write_snapshot() or failure_report() has returned on that rank, to `contents`.
// Errors: kIo for a report of failure_report(), kFormat for an invalid report, kShape for a tensor whose dtype or shape
// differs between ranks, a name that is a tensor on one rank and an object on another, and an object that two ranks
// have saved.
void add_report(CheckpointContents& contents, const std::string& report);

}  // namespace tessera
