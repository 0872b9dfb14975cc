// Checkpoints of a training run: any named tensors (DTensors or plain) and a JSON of everything else.
//
//   CheckpointWriter writer({.folder = run / "checkpoints", .world = world, .keep_last = 2});
//   writer.save(step, {{"model.norm.weight", norm}, ...}, {{"data", loader.state()}});   // COLLECTIVE over the world
//   writer.finish();                                                                     // COLLECTIVE over the world
//   auto checkpoint = Checkpoint::latest(run / "checkpoints", *world->group());          // COLLECTIVE over the world
//   if (checkpoint) checkpoint->load({{"model.norm.weight", norm}, ...});
//
// A checkpoint is a folder step-XXXXXXXX. It is a PyTorch distributed checkpoint, which torch.distributed.checkpoint
// can load. It also has a manifest.json with an XXH3 hash of each file and all state that is not a tensor
// (docs/format/checkpoint.md). The folder is written under a temporary name, synced and renamed; then the file LATEST,
// which names the newest checkpoint, is replaced. So a published checkpoint is always complete and never overwritten,
// and an older checkpoint is deleted only after a newer checkpoint is published. load() works with any world size, with
// any placements of Shard, StridedShard and Replicate, and with folders that PyTorch wrote.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/rendezvous/world.h"
#include "tessera/formats/torch/dcp_folder.h"
#include "tessera/state/state_value.h"

namespace tessera {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using NamedObjects = std::vector<std::pair<std::string, StateValue>>;  // numbers, text, lists of them

struct CheckpointOptions {
  std::filesystem::path folder;  // created when missing
  std::shared_ptr<comm::World> world;
  int64_t keep_last = 2;  // number of latest checkpoints to keep; 0: all
  int64_t keep_best = 1;  // number of checkpoints with the lowest validation loss to keep
  bool async = true;  // write in a thread during training; false: write inside save(), without copies of CPU tensors
  // Only with async. true: save() does not wait for the copy of the tensors. The writer thread copies CPU tensors;
  // tensors of an accelerator are copied on a separate stream. The caller must call wait_for_snapshot() before one of
  // the tensors changes; that call makes the caller's stream wait for the copies of the accelerator tensors.
  bool defer_copy = false;
  // The ranks that hold the same tensors as this rank: the ranks of its pipeline stage. They divide the writing of
  // replicated tensors among them. A DTensor whose mesh covers only some of these ranks is written by the mesh with the
  // lowest rank. Empty: all ranks.
  std::vector<int> stage_ranks = {};
};

struct Manifest;  // checkpoint/manifest.h

class CheckpointWriter {
 public:
  // Makes a writer for the checkpoint folder of `options`. Rank 0 deletes the remains of interrupted saves from this
  // folder, so no other writer may use the folder at the same time. No communication.
  explicit CheckpointWriter(CheckpointOptions options);
  ~CheckpointWriter();  // waits until this rank has written its files; errors are logged
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Copies this rank's shards of `tensors` and starts to write them. Returns when the copies are made (with defer_copy
  // at once; without async when the checkpoint is written). A save that is still running is finished first.
  //
  // `tensors` must have the same names on all ranks of a pipeline stage, and other names on other stages. A replicated
  // tensor, or a tensor under two names, is written once. `objects` must be equal on the ranks of a stage, too. PyTorch
  // finds "model.NAME" as NAME in its state dict "model". `validation_loss` orders checkpoints for keep_best.
  //
  // Errors: kIo when this or the previous save failed on any rank, or when the ranks together did not hold each element
  // exactly once; a failed save leaves no files. kShape for placements that cannot be saved (Partial), before anything
  // is done. A failure to delete old checkpoints is only logged. Ranks may take any time to write: no collective waits
  // for them. COLLECTIVE over the world.
  void save(int64_t step, const NamedTensors& tensors, const nlohmann::json& extra,
            std::optional<double> validation_loss = std::nullopt, const NamedObjects& objects = {});
  // Returns when the tensors of the last save() may change; without defer_copy that is at once. Before this call the
  // caller must not write to the tensors or to memory that they share; reading, forward and backward are allowed. A
  // save is published once every rank has called this function (or finish(), or the next save()) in the thread that
  // called save(). A tensor that changed too early fails the save on all ranks, with an error that names the
  // tensor; so does a copy that failed. No communication.
  void wait_for_snapshot();
  // Waits until the last save is published. Error kIo as in save(). COLLECTIVE over the world.
  void finish();
  // Whether this rank knows that the running save has failed: rank 0 knows the failures of all ranks, another rank only
  // its own. If true, finish() will throw on every rank. No communication.
  bool failed() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class Checkpoint {
 public:
  // Opens the checkpoint that the file LATEST names; nullopt without LATEST. Error kFormat when the checkpoint is
  // damaged.
  static std::optional<Checkpoint> latest(const std::filesystem::path& folder);
  // Opens the checkpoint that LATEST names on all ranks of a group, and checks all its contents. The first rank of the
  // group reads LATEST and broadcasts it. One rank compares each file with its hash (in a folder without hashes, each
  // record with its checksum). All ranks throw the same Error, which names the rank that found the damage. COLLECTIVE
  // over the group.
  static std::optional<Checkpoint> latest(const std::filesystem::path& folder, comm::Group& group);
  // Opens the given checkpoint and checks all its contents as latest(folder, group) does. COLLECTIVE over the group.
  static Checkpoint open(const std::filesystem::path& checkpoint, comm::Group& group);
  // Opens one checkpoint without reading its tensors: checks manifest.json, .metadata and the sizes of the files. A
  // folder without manifest.json was written by PyTorch: step() is 0, extra() is empty, and only its records have
  // checksums (CRC-32). Such a folder inside a run's checkpoint folder is Error kFormat.
  static Checkpoint open(const std::filesystem::path& checkpoint);

  const std::filesystem::path& path() const { return path_; }
  int64_t step() const;
  const nlohmann::json& extra() const;
  // false: PyTorch wrote the checkpoint, and verify() compares the checksums that its records have.
  bool has_hashes() const { return manifest_ != nullptr; }
  const Manifest* manifest() const { return manifest_.get(); }  // null in a folder that PyTorch wrote
  const DcpFolder& contents() const { return *contents_; }
  // Fills the tensors in place. Each rank reads only the parts of the files that its shards need. All problems (missing
  // tensors, other shapes or dtypes) are found before any tensor is changed: Error kShape. No communication.
  void load(const NamedTensors& tensors) const;
  // Compares every file with its hash (without hashes: every record with its checksum) and reads every record. Error
  // kFormat names the first difference. Returns the number of records with neither hash nor checksum, whose values may
  // be damaged unnoticed. No communication.
  size_t verify() const;

 private:
  Checkpoint() = default;
  void verify_file(size_t file) const;

  std::filesystem::path path_;
  std::shared_ptr<const Manifest> manifest_;
  std::shared_ptr<const DcpFolder> contents_;
};

}  // namespace tessera
