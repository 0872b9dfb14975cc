#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/held_boxes.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/safetensors.h"

namespace tessera {

struct Checkpoint::Impl {
  std::filesystem::path path;
  Manifest manifest;
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

const std::filesystem::path& Checkpoint::path() const { return impl_->path; }
int64_t Checkpoint::step() const { return impl_->manifest.step; }
const nlohmann::json& Checkpoint::extra() const { return impl_->manifest.extra; }

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

Checkpoint Checkpoint::open(const std::filesystem::path& path, comm::Group& group) {
  std::optional<Checkpoint> checkpoint;
  comm::attempt_together(group, [&] {
    checkpoint = open(path);
    const auto files = checkpoint->impl_->manifest.files.size();
    for (size_t file = group.rank(); file < files; file += static_cast<size_t>(group.size()))
      checkpoint->verify_file(file);
  });
  return std::move(*checkpoint);
}

Checkpoint Checkpoint::open(const std::filesystem::path& checkpoint) {
  auto impl = std::make_unique<Impl>();
  impl->path = checkpoint;
  const auto path = checkpoint / "manifest.json";
  impl->manifest = Manifest::parse(read_file(path), path);
  for (const auto& file : impl->manifest.files) {
    std::error_code failed;
    const auto found = std::filesystem::file_size(checkpoint / file.name, failed);
    TESSERA_CHECK(
        !failed && found == file.size_bytes, ErrorKind::kFormat,
        "[checkpoint.load] {}: found {} bytes, manifest.json says {}. The checkpoint is damaged; take an older one.",
        (checkpoint / file.name).string(), failed ? 0 : found, file.size_bytes);
  }
  return Checkpoint(std::move(impl));
}

void Checkpoint::verify() const {
  for (size_t file = 0; file < impl_->manifest.files.size(); ++file) verify_file(file);
}

void Checkpoint::verify_file(size_t index) const {
  const auto& file = impl_->manifest.files[index];
  const auto found = hash_file(impl_->path / file.name);
  TESSERA_CHECK(found == file.xxh3, ErrorKind::kFormat,
                "[checkpoint.verify] {}: hash is {:016x}, manifest.json says {:016x}. The file changed after it was "
                "written; take an older checkpoint.",
                (impl_->path / file.name).string(), found, file.xxh3);
}

namespace {

bool meet(const ManifestPart& part, const HeldBox& box) {
  for (size_t d = 0; d < part.shape.size(); ++d) {
    const int64_t begin = std::max(part.offset[d], box.offset[d]);
    if (begin >= std::min(part.offset[d] + part.shape[d], box.offset[d] + box.shape[d])) return false;
  }
  return true;
}

// Copies the intersection of one stored part with a box of the local tensor.
void copy_part(const at::Tensor& local, const HeldBox& box, const std::string& name, const ManifestPart& part,
               const SafetensorsFile& file) {
  std::vector<IndexRange> source(part.shape.size());
  at::Tensor into = local;
  for (size_t d = 0; d < part.shape.size(); ++d) {
    const int64_t begin = std::max(part.offset[d], box.offset[d]);
    const int64_t end = std::min(part.offset[d] + part.shape[d], box.offset[d] + box.shape[d]);
    const int64_t stored = (part.at.empty() ? 0 : part.at[d]) - part.offset[d];
    source[d] = {begin + stored, end + stored};
    into = into.narrow(static_cast<int64_t>(d), begin - box.offset[d] + box.at[d], end - begin);
  }
  into.copy_(file.read_slice(name, source));
}

// Whether the file's tensor holds the parts that the manifest says are in it, and nothing else.
bool is_stored(const SafetensorsFile& file, const std::string& name, const ManifestTensor& tensor, size_t index) {
  if (!file.contains(name)) return false;
  const auto& shape = file.entry(name).shape;
  int64_t elements = 0;
  for (const auto& part : tensor.parts) {
    if (part.file != index) continue;
    if (part.shape.size() != shape.size()) return false;
    for (size_t d = 0; d < shape.size(); ++d) {
      if ((part.at.empty() ? 0 : part.at[d]) + part.shape[d] > shape[d]) return false;
    }
    elements += c10::multiply_integers(part.shape);
  }
  return elements == c10::multiply_integers(shape);
}

}  // namespace

void Checkpoint::load(const NamedTensors& tensors) const {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : tensors) {
    const auto found = impl_->manifest.tensors.find(name);
    TESSERA_CHECK(found != impl_->manifest.tensors.end(), ErrorKind::kShape,
                  "[checkpoint.load] {}: not in {}. Resume with the recipe that wrote it.", name, impl_->path.string());
    TESSERA_CHECK(at::IntArrayRef(found->second.shape) == tensor.sizes() && found->second.dtype == tensor.scalar_type(),
                  ErrorKind::kShape,
                  "[checkpoint.load] {}: saved {} [{}], the run wants {} [{}]. Resume with the recipe that wrote it.",
                  name, c10::toString(found->second.dtype), fmt::join(found->second.shape, ", "),
                  c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
  }
  std::vector<std::shared_ptr<const SafetensorsFile>> files(impl_->manifest.files.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor local = is_dtensor(tensor) ? to_local(tensor) : tensor;
    const auto boxes = held_boxes(tensor);
    const auto& saved = impl_->manifest.tensors.at(name);
    for (const auto& part : saved.parts) {
      const bool wanted = std::any_of(boxes.begin(), boxes.end(), [&](const HeldBox& box) { return meet(part, box); });
      if (!wanted) continue;
      auto& file = files[part.file];
      if (!file) file = SafetensorsFile::open(impl_->path / impl_->manifest.files[part.file].name);
      TESSERA_CHECK(
          is_stored(*file, name, saved, part.file), ErrorKind::kFormat,
          "[checkpoint.load] {}: {} differs from manifest.json. The checkpoint is damaged; take an older one.",
          file->path().string(), name);
      for (const auto& box : boxes) {
        if (meet(part, box)) copy_part(local, box, name, part, *file);
      }
    }
  }
}

}  // namespace tessera
