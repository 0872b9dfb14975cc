// Checkpoints of a training run: any named tensors (DTensors or plain) and a JSON of everything else.
//
//   CheckpointWriter writer({.folder = run / "checkpoints", .world = world, .keep_last = 2});
//   writer.save(step, {{"model.norm.weight", norm}, ...}, {{"data", loader.state()}});   // COLLECTIVE over the world
//   writer.finish();                                                                     // COLLECTIVE over the world
//   auto checkpoint = Checkpoint::latest(run / "checkpoints", *world->group());          // COLLECTIVE over the world
//   if (checkpoint) checkpoint->load({{"model.norm.weight", norm}, ...});
//
// A checkpoint is a folder step-XXXXXXXX, which is a PyTorch distributed checkpoint (torch.distributed.checkpoint loads
// it) with a manifest.json beside it: an XXH3 hash of each file and what is no tensor (docs/format/checkpoint.md). It
// is written under another name, synced and renamed; LATEST is replaced last. What is published is never half-written,
// never overwritten, and an older checkpoint goes only after a newer one is there. Loading takes any world size and any
// placements of Shard, StridedShard and Replicate, and folders that PyTorch wrote.
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
  std::filesystem::path folder;  // made when it is not there
  std::shared_ptr<comm::World> world;
  int64_t keep_last = 2;  // how many of those published last stay; 0: all
  int64_t keep_best = 1;  // and how many with the lowest validation loss
  bool async = true;      // write in a thread while training goes on; false: no copy of the tensors is made
  // With async: the copy that is written is made by that thread, too, of tensors on the CPU; of those of an accelerator
  // it is under way on a stream of its own. Whoever saves then calls wait_for_snapshot() before one of them changes,
  // which orders what its thread launches next behind the latter.
  bool defer_copy = false;
  // The ranks whose tensors are called as this rank's: of its pipeline stage. They share the writing of what they all
  // have; of DTensors on some of them only, the mesh with the lowest rank writes. None: all ranks.
  std::vector<int> holders = {};
};

struct Manifest;  // checkpoint/manifest.h

class CheckpointWriter {
 public:
  // No communication. Rank 0 removes from the folder what saves left that were killed, so that no other writer may be
  // at work in it.
  explicit CheckpointWriter(CheckpointOptions options);
  ~CheckpointWriter();  // waits for this rank's own writing; errors are logged
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Takes a copy (see defer_copy) of this rank's parts of `tensors` (the same names on all ranks of a pipeline stage,
  // others on those of another; replicas and a tensor under two names are written once) and starts writing. `objects`
  // are alike on those ranks, too. PyTorch finds "model.NAME" as NAME in its state dict "model". A save still under way
  // is finished first. Returns when written unless async. Ranks may take any time to write. `validation_loss` ranks the
  // checkpoint for keep_best. COLLECTIVE over the world. Error kIo when this or the previous save failed on any rank,
  // or when the ranks together did not hold each tensor exactly once; nothing of the failed one stays. Error kShape for
  // placements that cannot be saved (Partial), before anything is done. What cannot be pruned is logged.
  void save(int64_t step, const NamedTensors& tensors, const nlohmann::json& extra,
            std::optional<double> validation_loss = std::nullopt, const NamedObjects& objects = {});
  // Returns when the tensors of the last save() may change, which without defer_copy is at once. What must not happen
  // before: writes to them, and to memory that they share; reading, forward and backward are free. A save is published
  // once every rank has called this (or finish(), or the next save()), in the thread that called save(). A tensor that
  // changed before fails the save as a file that cannot be written does, by name and on all ranks; so does a copy that
  // fails. No communication.
  void wait_for_snapshot();
  // Waits until the last save is published; Error kIo as above. COLLECTIVE over the world.
  void finish();
  // Whether the save under way has failed, as far as this rank knows: rank 0 knows of all, another of its own part.
  // Then finish() throws on every rank. No communication.
  bool failed() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class Checkpoint {
 public:
  // The one that LATEST names, or nullopt when there is none. Error kFormat when it is damaged.
  static std::optional<Checkpoint> latest(const std::filesystem::path& folder);
  // The same for a run: the first rank of the group reads LATEST for all, and every file is compared with its hash (in
  // a folder without, every record with its checksum), by one rank each. The same Error on all ranks, which names the
  // rank that found it. COLLECTIVE over the group.
  static std::optional<Checkpoint> latest(const std::filesystem::path& folder, comm::Group& group);
  // One checkpoint, compared and opened likewise. COLLECTIVE over the group.
  static Checkpoint open(const std::filesystem::path& checkpoint, comm::Group& group);
  // The folder of one checkpoint. Reads and checks manifest.json, .metadata and the sizes of the files. A folder
  // without manifest.json is one that PyTorch wrote: step 0, nothing extra, no hashes to compare but records' CRCs.
  // Among a run's checkpoints it is an Error kFormat.
  static Checkpoint open(const std::filesystem::path& checkpoint);

  const std::filesystem::path& path() const { return path_; }
  int64_t step() const;
  const nlohmann::json& extra() const;
  // false: PyTorch wrote it, and verify() compares what checksums its records have
  bool has_hashes() const { return manifest_ != nullptr; }
  const Manifest* manifest() const { return manifest_.get(); }  // null in a folder that PyTorch wrote
  const DcpFolder& contents() const { return *contents_; }
  // Fills the tensors in place, each rank reading only what its parts need. All problems (missing tensors, other shapes
  // or dtypes) are found before anything is changed: Error kShape. No communication.
  void load(const NamedTensors& tensors) const;
  // Compares every file with its hash, or without hashes every record with its checksum, and reads every record; Error
  // kFormat names the first that differs. Returns how many records have neither, so that their values may be anything.
  // No communication.
  size_t verify() const;

 private:
  Checkpoint() = default;
  void verify_file(size_t file) const;

  std::filesystem::path path_;
  std::shared_ptr<const Manifest> manifest_;
  std::shared_ptr<const DcpFolder> contents_;
};

}  // namespace tessera
