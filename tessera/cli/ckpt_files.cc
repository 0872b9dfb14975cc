#include "tessera/cli/ckpt_files.h"

#include <ATen/ATen.h>

#include <array>
#include <fstream>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/quote.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/formats/gguf.h"
#include "tessera/formats/safetensors_folder.h"
#include "tessera/models/gguf_convert.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

enum class Kind { kGguf, kSafetensors, kCheckpoint };

Kind kind_of(const fs::path& path) {
  if (fs::is_directory(path)) return fs::exists(path / "manifest.json") ? Kind::kCheckpoint : Kind::kSafetensors;
  TESSERA_CHECK(fs::exists(path), ErrorKind::kIo, "[ckpt] {}: does not exist", path.string());
  std::array<char, 4> magic{};
  std::ifstream(path, std::ios::binary).read(magic.data(), magic.size());
  return std::string_view(magic.data(), magic.size()) == "GGUF" ? Kind::kGguf : Kind::kSafetensors;
}

std::vector<ListedTensor> list_gguf(const fs::path& path) {
  std::vector<ListedTensor> result;
  const auto file = GgufFile::open(path);
  for (const auto& [name, info] : file->tensors()) {
    result.push_back({name, std::string(info.type_name()), info.shape, info.end - info.begin, path.filename()});
  }
  return result;
}

std::vector<ListedTensor> list_safetensors(const fs::path& path) {
  std::vector<ListedTensor> result;
  const auto folder = SafetensorsFolder::open(path);
  for (const auto& [name, file] : folder.files()) {
    const auto& entry = file->entry(name);
    result.push_back({name, std::string(safetensors_dtype_name(entry.dtype)), entry.shape, entry.size_bytes(),
                      file->path().filename()});
  }
  return result;
}

std::vector<ListedTensor> list_manifest(const fs::path& path) {
  std::vector<ListedTensor> result;
  const auto manifest = Manifest::parse(read_file(path / "manifest.json"), path / "manifest.json");
  for (const auto& [name, tensor] : manifest.tensors) {
    uint64_t bytes = c10::elementSize(tensor.dtype);
    for (const int64_t size : tensor.shape) bytes *= static_cast<uint64_t>(size);
    const auto file = tensor.parts.size() == 1 ? manifest.files.at(tensor.parts[0].file).name
                                               : fmt::format("{} files", tensor.parts.size());
    result.push_back({name, std::string(safetensors_dtype_name(tensor.dtype)), tensor.shape, bytes, file});
  }
  return result;
}

std::optional<c10::ScalarType> parse_hf_dtype(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "float32" || name == "f32") return at::kFloat;
  if (name == "bfloat16" || name == "bf16") return at::kBFloat16;
  if (name == "float16" || name == "f16") return at::kHalf;
  raise(ErrorKind::kConfig, "[ckpt.convert] --dtype {}: a Hugging Face folder takes float32, bfloat16 or float16",
        name);
}

std::optional<GgmlType> parse_gguf_dtype(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "float32" || name == "f32") return GgmlType::kF32;
  if (name == "bfloat16" || name == "bf16") return GgmlType::kBF16;
  if (name == "float16" || name == "f16") return GgmlType::kF16;
  if (name == "q8_0") return GgmlType::kQ8_0;
  raise(ErrorKind::kConfig, "[ckpt.convert] --dtype {}: a GGUF file takes float32, bfloat16, float16 or q8_0", name);
}

void check_finite(const at::Tensor& tensor, const std::string& name, const fs::path& path) {
  if (!tensor.is_floating_point() || tensor.numel() == 0) return;
  // isfinite() knows no float8; whatever is not finite there is not finite in float32 either.
  const auto values = tensor.element_size() == 1 ? tensor.to(at::kFloat) : tensor;
  TESSERA_CHECK(values.isfinite().all().item<bool>(), ErrorKind::kFormat,
                "[ckpt.verify] {}: tensor {} holds values that are not finite", path.string(), quote(name));
}

}  // namespace

std::vector<ListedTensor> list_tensors(const fs::path& path) {
  switch (kind_of(path)) {
    case Kind::kGguf:
      return list_gguf(path);
    case Kind::kCheckpoint:
      return list_manifest(path);
    case Kind::kSafetensors:
      return list_safetensors(path);
  }
  raise(ErrorKind::kInternal, "[ckpt.ls] {}: kind of file", path.string());
}

void convert_checkpoint(const fs::path& source, const fs::path& destination, const ConvertOptions& options) {
  const auto kind = kind_of(source);
  const auto to = !options.to.empty() ? options.to : kind == Kind::kGguf ? "hf" : "gguf";
  TESSERA_CHECK(to == "hf" || to == "gguf", ErrorKind::kConfig, "[ckpt.convert] --to {}: wanted hf or gguf", to);
  const bool possible = to == "hf" ? kind == Kind::kGguf : kind == Kind::kSafetensors && fs::is_directory(source);
  TESSERA_CHECK(possible, ErrorKind::kConfig,
                "[ckpt.convert] {}: converting this to {} is not available in this version (a GGUF file to hf and a "
                "Hugging Face folder to gguf are)",
                source.string(), to);
  if (to == "hf") {
    gguf_to_folder(source, destination, {.dtype = parse_hf_dtype(options.dtype)});
  } else {
    folder_to_gguf(source, destination, {.type = parse_gguf_dtype(options.dtype)});
  }
}

VerifiedFiles verify_checkpoint(const fs::path& path) {
  VerifiedFiles result;
  for (const auto& tensor : list_tensors(path)) {
    ++result.tensors;
    result.size_bytes += tensor.size_bytes;
  }
  const auto kind = kind_of(path);
  if (kind == Kind::kCheckpoint) {
    Checkpoint::open(path).verify();
  } else if (kind == Kind::kGguf) {
    const auto file = GgufFile::open(path);
    for (const auto& [name, info] : file->tensors()) {
      if (ggml_type_info(static_cast<uint32_t>(info.type))->decodes) {
        check_finite(file->tensor(name), name, path);
      } else {
        ++result.unread[std::string(info.type_name())];
      }
    }
  } else {
    const auto folder = SafetensorsFolder::open(path);
    for (const auto& [name, file] : folder.files()) check_finite(file->tensor(name), name, file->path());
  }
  return result;
}

}  // namespace tessera::cli
