#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/held_boxes.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

struct Checkpoint::Impl {
  std::filesystem::path path;
  std::optional<Manifest> manifest;  // none in a folder that PyTorch wrote
  std::shared_ptr<const DcpFolder> contents;
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

const std::filesystem::path& Checkpoint::path() const { return impl_->path; }
const std::optional<Manifest>& Checkpoint::manifest() const { return impl_->manifest; }
int64_t Checkpoint::step() const { return impl_->manifest ? impl_->manifest->step : 0; }
const nlohmann::json& Checkpoint::extra() const {
  static const nlohmann::json nothing = nlohmann::json::object();
  return impl_->manifest ? impl_->manifest->extra : nothing;
}
bool Checkpoint::has_hashes() const { return impl_->manifest.has_value(); }
const DcpFolder& Checkpoint::contents() const { return *impl_->contents; }

std::optional<Checkpoint> Checkpoint::latest(const std::filesystem::path& folder) {
  const auto name = CheckpointFolder::latest_name(folder);
  if (!name) return std::nullopt;
  return open(folder / *name);
}

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

Checkpoint Checkpoint::open(const std::filesystem::path& path, comm::Group& group) {
  std::optional<Checkpoint> checkpoint;
  comm::attempt_together(group, [&] {
    checkpoint = open(path);
    const auto rank = static_cast<size_t>(group.rank()), ranks = static_cast<size_t>(group.size());
    const auto& manifest = checkpoint->impl_->manifest;
    if (!manifest) checkpoint->contents().check_records(DcpFolder::Check::kValues, rank, ranks);
    for (size_t file = rank; manifest && file < manifest->files.size(); file += ranks) checkpoint->verify_file(file);
  });
  return std::move(*checkpoint);
}

Checkpoint Checkpoint::open(const std::filesystem::path& checkpoint) {
  auto impl = std::make_unique<Impl>();
  impl->path = checkpoint;
  TESSERA_CHECK(
      std::filesystem::is_directory(checkpoint), ErrorKind::kFormat, "[checkpoint.load] {}: is no folder{}",
      checkpoint.string(),
      CheckpointFolder::is_of_a_run(checkpoint)
          ? ", though LATEST lies beside it. Take another checkpoint, in a recipe with checkpoint.resume=PATH."
          : "");
  const auto path = checkpoint / "manifest.json";
  const bool has_manifest = std::filesystem::exists(path);
  TESSERA_CHECK(
      has_manifest || DcpFolder::is_one(checkpoint), ErrorKind::kFormat,
      "[checkpoint.load] {}: holds neither manifest.json nor .metadata. It is no checkpoint, or its save never "
      "ended.",
      checkpoint.string());
  TESSERA_CHECK(
      has_manifest || !CheckpointFolder::is_of_a_run(checkpoint), ErrorKind::kFormat,
      "[checkpoint.load] {}: manifest.json is missing, so that there are no hashes to compare and nothing that "
      "a run could go on with. The checkpoint is damaged; take another one, in a recipe with "
      "checkpoint.resume=PATH, or move the folder out of the run's to take its tensors unchecked.",
      checkpoint.string());
  if (has_manifest) {
    impl->manifest = Manifest::parse(read_file(path), path);
    check_sizes(checkpoint, *impl->manifest);
  }
  impl->contents = DcpFolder::open(checkpoint);
  return Checkpoint(std::move(impl));
}

size_t Checkpoint::verify() const {
  for (size_t file = 0; impl_->manifest && file < impl_->manifest->files.size(); ++file) verify_file(file);
  const auto unknown =
      impl_->contents->check_records(impl_->manifest ? DcpFolder::Check::kPickles : DcpFolder::Check::kValues);
  return impl_->manifest ? 0 : unknown;
}

void Checkpoint::verify_file(size_t index) const {
  const auto& file = impl_->manifest->files[index];
  const auto found = hash_file(impl_->path / file.name);
  TESSERA_CHECK(found == file.xxh3, ErrorKind::kFormat,
                "[checkpoint.verify] {}: hash is {:016x}, manifest.json says {:016x}. The file changed after it was "
                "written; take an older checkpoint, in a recipe with checkpoint.resume=PATH.",
                (impl_->path / file.name).string(), found, file.xxh3);
}

void Checkpoint::load(const NamedTensors& tensors) const {
  const at::NoGradGuard no_grad;
  const auto& contents = *impl_->contents;
  for (const auto& [name, tensor] : tensors) {
    const auto* saved = contents.find_tensor(name);
    TESSERA_CHECK(saved, ErrorKind::kShape, "[checkpoint.load] {}: not in {}. Resume with the recipe that wrote it.",
                  name, impl_->path.string());
    TESSERA_CHECK(at::IntArrayRef(saved->size) == tensor.sizes() && saved->dtype == tensor.scalar_type(),
                  ErrorKind::kShape,
                  "[checkpoint.load] {}: saved {} [{}], the run wants {} [{}]. Resume with the recipe that wrote it.",
                  name, c10::toString(saved->dtype), fmt::join(saved->size, ", "), c10::toString(tensor.scalar_type()),
                  fmt::join(tensor.sizes(), ", "));
  }
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor local = is_dtensor(tensor) ? to_local(tensor) : tensor;
    for (const auto& box : held_boxes(tensor)) contents.read(name, box.offset, held_part(local, box));
  }
}

}  // namespace tessera
