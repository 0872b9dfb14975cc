#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/local_boxes.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

int64_t Checkpoint::step() const { return manifest_ ? manifest_->step : 0; }

const nlohmann::json& Checkpoint::extra() const {
  static const nlohmann::json nothing = nlohmann::json::object();
  return manifest_ ? manifest_->extra : nothing;
}

std::optional<Checkpoint> Checkpoint::latest(const std::filesystem::path& folder) {
  const auto name = CheckpointFolder::latest_name(folder);
  if (!name) return std::nullopt;
  return open(folder / *name);
}

// Only one rank reads LATEST: with a shared folder, ranks that read it at different times could see different values.
std::optional<Checkpoint> Checkpoint::latest(const std::filesystem::path& folder, comm::Group& group) {
  std::string name;
  comm::attempt_together(group, [&] {
    if (group.rank() == 0) name = CheckpointFolder::latest_name(folder).value_or("");
  });
  name = comm::broadcast_bytes(group, name);
  if (name.empty()) return std::nullopt;
  return open(folder / name, group);
}

namespace {

void check_sizes(const std::filesystem::path& checkpoint, const Manifest& manifest) {
  for (const auto& file : manifest.files) {
    std::error_code failed;
    const auto found = std::filesystem::file_size(checkpoint / file.name, failed);
    TESSERA_CHECK(
        !failed && found == file.size_bytes, ErrorKind::kFormat,
        "[checkpoint.load] {}: found {} bytes, manifest.json says {}. The checkpoint is damaged; take an older "
        "one, in a recipe with checkpoint.resume=PATH.",
        (checkpoint / file.name).string(), failed ? 0 : found, file.size_bytes);
  }
}

}  // namespace

// The files (or records) are divided round-robin over the ranks, so each file is read by one rank. attempt_together()
// throws the first error of any rank on all ranks.
Checkpoint Checkpoint::open(const std::filesystem::path& path, comm::Group& group) {
  std::optional<Checkpoint> checkpoint;
  comm::attempt_together(group, [&] {
    checkpoint = open(path);
    const auto rank = static_cast<size_t>(group.rank()), ranks = static_cast<size_t>(group.size());
    const auto& manifest = checkpoint->manifest_;
    if (!manifest) checkpoint->contents().check_records(DcpFolder::Check::kValues, rank, ranks);
    for (size_t file = rank; manifest && file < manifest->files.size(); file += ranks) checkpoint->verify_file(file);
  });
  return std::move(*checkpoint);
}

Checkpoint Checkpoint::open(const std::filesystem::path& checkpoint) {
  Checkpoint opened;
  opened.path_ = checkpoint;
  TESSERA_CHECK(
      std::filesystem::is_directory(checkpoint), ErrorKind::kFormat, "[checkpoint.load] {}: is no folder{}",
      checkpoint.string(),
      CheckpointFolder::is_run_checkpoint(checkpoint)
          ? ", although LATEST is next to it. Take another checkpoint, in a recipe with checkpoint.resume=PATH."
          : "");
  const auto path = checkpoint / "manifest.json";
  const bool has_manifest = std::filesystem::exists(path);
  TESSERA_CHECK(
      has_manifest || DcpFolder::is_dcp_folder(checkpoint), ErrorKind::kFormat,
      "[checkpoint.load] {}: holds neither manifest.json nor .metadata. It is not a checkpoint, or its save was "
      "interrupted.",
      checkpoint.string());
  TESSERA_CHECK(
      has_manifest || !CheckpointFolder::is_run_checkpoint(checkpoint), ErrorKind::kFormat,
      "[checkpoint.load] {}: manifest.json is missing, so there are no hashes to compare and no state from which a run "
      "could resume. The checkpoint is damaged; take another one, in a recipe with checkpoint.resume=PATH, or move the "
      "folder out of the run's folder to load its tensors unchecked.",
      checkpoint.string());
  if (has_manifest) {
    opened.manifest_ = std::make_shared<const Manifest>(Manifest::parse(read_file(path), path));
    check_sizes(checkpoint, *opened.manifest_);
  }
  opened.contents_ = DcpFolder::open(checkpoint);
  return opened;
}

// If there is a manifest, the hash of each file is compared with the hash in the manifest. These hashes cover all bytes
// of the tensors, so check_records() then checks only the pickles of the records. Without a manifest it also checks the
// checksums of the tensors' values.
size_t Checkpoint::verify() const {
  for (size_t file = 0; manifest_ && file < manifest_->files.size(); ++file) verify_file(file);
  const auto unknown = contents_->check_records(manifest_ ? DcpFolder::Check::kPickles : DcpFolder::Check::kValues);
  return manifest_ ? 0 : unknown;
}

void Checkpoint::verify_file(size_t index) const {
  const auto& file = manifest_->files[index];
  const auto found = hash_file(path_ / file.name);
  TESSERA_CHECK(found == file.xxh3, ErrorKind::kFormat,
                "[checkpoint.verify] {}: hash is {:016x}, manifest.json says {:016x}. The file changed after it was "
                "written; take an older checkpoint, in a recipe with checkpoint.resume=PATH.",
                (path_ / file.name).string(), found, file.xxh3);
}

// All tensors are compared with the checkpoint before the first is filled, so an error leaves the tensors unchanged.
void Checkpoint::load(const NamedTensors& tensors) const {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : tensors) {
    const auto* saved = contents_->find_tensor(name);
    TESSERA_CHECK(saved, ErrorKind::kShape, "[checkpoint.load] {}: not in {}. Resume with the recipe that wrote it.",
                  name, path_.string());
    TESSERA_CHECK(at::IntArrayRef(saved->size) == tensor.sizes() && saved->dtype == tensor.scalar_type(),
                  ErrorKind::kShape,
                  "[checkpoint.load] {}: saved {} [{}], the run wants {} [{}]. Resume with the recipe that wrote it.",
                  name, c10::toString(saved->dtype), fmt::join(saved->size, ", "), c10::toString(tensor.scalar_type()),
                  fmt::join(tensor.sizes(), ", "));
  }
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor local = is_dtensor(tensor) ? to_local(tensor) : tensor;
    for (const auto& box : local_boxes(tensor)) contents_->read(name, box.offset, local_box_view(local, box));
  }
}

}  // namespace tessera
