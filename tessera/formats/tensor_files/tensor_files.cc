#include "tessera/formats/tensor_files/tensor_files.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <array>
#include <fstream>

#include "tessera/base/enum_name.h"
#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/detail/boxes.h"
#include "tessera/formats/tensor_files/stored_formats.h"
#include "tessera/formats/torch/dcp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool holds_sharded_safetensors(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (is_shard_name(entry.path().filename().string())) return true;
  }
  return false;
}

// A zip archive, as torch.save writes since 1.6, begins with a local file header.
bool begins_like_zip(const fs::path& file) {
  std::array<char, 4> magic{};
  std::ifstream(file, std::ios::binary).read(magic.data(), magic.size());
  return std::string_view(magic.data(), magic.size()) == "PK\x03\x04";
}

bool has_safetensors(const fs::path& folder) {
  return fs::exists(folder / "model.safetensors") || fs::exists(folder / "model.safetensors.index.json");
}

bool has_torch_save(const fs::path& folder) {
  return fs::exists(folder / "pytorch_model.bin") || fs::exists(folder / "pytorch_model.bin.index.json");
}

}  // namespace

uint64_t StoredTensor::size_bytes() const {
  uint64_t bytes = c10::elementSize(dtype);
  for (const int64_t size : shape) bytes *= static_cast<uint64_t>(size);
  return bytes;
}

bool TensorFiles::is_there(const fs::path& path) {
  if (!fs::is_directory(path)) return fs::is_regular_file(path);
  return has_safetensors(path) || DcpFolder::is_one(path) || has_torch_save(path) || holds_sharded_safetensors(path);
}

std::shared_ptr<const TensorFiles> TensorFiles::open(const fs::path& path, const TensorFilesOptions& options) {
  TESSERA_CHECK(fs::exists(path), ErrorKind::kIo, "[formats] {}: does not exist", path.string());
  if (!fs::is_directory(path)) return begins_like_zip(path) ? open_torch_save(path, options) : open_safetensors(path);
  if (has_safetensors(path)) return open_safetensors(path);
  if (DcpFolder::is_one(path)) return open_dcp(path, options);
  if (has_torch_save(path)) return open_torch_save(path, options);
  if (holds_sharded_safetensors(path)) return open_safetensors_shards(path);
  TESSERA_CHECK(
      !fs::exists(path / "manifest.json"), ErrorKind::kFormat,
      "[formats] {}: holds manifest.json and no .metadata: a checkpoint of an earlier version of this program, "
      "or a damaged one. Load it with the program that wrote it, and export the model.",
      path.string());
  raise(ErrorKind::kIo,
        "[formats] {}: holds no tensors: neither model.safetensors nor its index, nor .metadata of a distributed "
        "checkpoint, pytorch_model.bin or shard-*.safetensors",
        path.string());
}

const StoredTensor& TensorFiles::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  TESSERA_CHECK(found != tensors_.end(), ErrorKind::kFormat,
                "[formats] {}: holds no tensor {}. List it with 'tessera ckpt ls PATH'.", path_.string(), quote(name));
  return found->second;
}

void TensorFiles::read(std::string_view name, c10::IntArrayRef offset, const at::Tensor& into) const {
  const auto& stored = at(name);
  TESSERA_CHECK(detail::box_lies_inside(offset, into.sizes(), stored.shape), ErrorKind::kShape,
                "[formats] {}: {}: wanted [{}] from [{}] on, saved [{}]", path_.string(), quote(name),
                fmt::join(into.sizes(), ", "), fmt::join(offset, ", "), fmt::join(stored.shape, ", "));
  const at::NoGradGuard no_grad;
  read_box(std::string(name), offset, into);
}

at::Tensor TensorFiles::tensor(std::string_view name) const {
  const auto& stored = at(name);
  const auto whole = at::empty(stored.shape, at::TensorOptions(stored.dtype));
  read(name, std::vector<int64_t>(stored.shape.size(), 0), whole);
  return whole;
}

const char* to_string(TensorFiles::Format format) {
  return enum_name(format, {"safetensors", "sharded safetensors", "DCP", "torch.save"});
}

}  // namespace tessera
