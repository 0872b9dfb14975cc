#include "tessera/checkpoint/manifest.h"

#include <fmt/ranges.h>
#include <xxhash.h>

#include "tessera/base/error.h"
#include "tessera/base/mapped_file.h"
#include "tessera/formats/safetensors.h"

namespace tessera {
namespace {

constexpr const char* kFormatName = "tessera.checkpoint";
constexpr int kVersion = 1;

int64_t volume(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

void check_box(const std::string& name, const ManifestTensor& tensor, const ManifestPart& part, size_t files) {
  bool ok = part.file < files && part.offset.size() == tensor.shape.size() && part.shape.size() == tensor.shape.size();
  for (size_t d = 0; ok && d < tensor.shape.size(); ++d) {
    ok = part.offset[d] >= 0 && part.shape[d] >= 0 && part.offset[d] <= tensor.shape[d] - part.shape[d];
  }
  TESSERA_CHECK(ok, ErrorKind::kFormat, "{}: a part at {} of shape {} lies outside {}", name, fmt::join(part.offset, ","),
                fmt::join(part.shape, ","), fmt::join(tensor.shape, ","));
}

ManifestTensor parse_tensor(const std::string& name, const nlohmann::json& json, size_t files) {
  ManifestTensor tensor;
  tensor.dtype = parse_safetensors_dtype(json.at("dtype").get<std::string>());
  tensor.shape = json.at("shape").get<std::vector<int64_t>>();
  for (const int64_t size : tensor.shape) {
    TESSERA_CHECK(size >= 0 && size <= (int64_t{1} << 48), ErrorKind::kFormat, "{}: dim of {} elements", name, size);
  }
  int64_t covered = 0;
  for (const auto& each : json.at("parts")) {
    ManifestPart part{each.at("file").get<size_t>(), each.at("offset").get<std::vector<int64_t>>(),
                      each.at("shape").get<std::vector<int64_t>>()};
    check_box(name, tensor, part, files);
    covered += volume(part.shape);
    tensor.parts.push_back(std::move(part));
  }
  TESSERA_CHECK(covered == volume(tensor.shape), ErrorKind::kFormat, "{}: parts cover {} of {} elements", name, covered,
                volume(tensor.shape));
  return tensor;
}

}  // namespace

nlohmann::json part_to_json(const ManifestPart& part) {
  return {{"file", part.file}, {"offset", part.offset}, {"shape", part.shape}};
}

std::string Manifest::dump() const {
  nlohmann::ordered_json out = {{"format", kFormatName}, {"version", kVersion}, {"step", step}, {"world_size", world_size}};
  out["number"] = number;
  out["validation_loss"] = validation_loss ? nlohmann::json(*validation_loss) : nlohmann::json();
  for (const auto& file : files) {
    out["files"].push_back({{"name", file.name}, {"bytes", file.size_bytes}, {"xxh3", fmt::format("{:016x}", file.xxh3)}});
  }
  out["tensors"] = nlohmann::json::object();
  for (const auto& [name, tensor] : tensors) {
    nlohmann::json parts = nlohmann::json::array();
    for (const auto& part : tensor.parts) parts.push_back(part_to_json(part));
    out["tensors"][name] = {{"dtype", safetensors_dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"parts", parts}};
  }
  out["extra"] = extra;
  return out.dump(1);
}

Manifest Manifest::parse(const std::string& text, const std::filesystem::path& path) {
  try {
    const auto json = nlohmann::json::parse(text);
    TESSERA_CHECK(json.at("format") == kFormatName && json.at("version") == kVersion, ErrorKind::kFormat,
                  "format {} version {}, this program reads {} version {}", json.at("format").dump(),
                  json.at("version").dump(), kFormatName, kVersion);
    Manifest manifest;
    manifest.step = json.at("step").get<int64_t>();
    manifest.world_size = json.at("world_size").get<int64_t>();
    manifest.number = json.value("number", int64_t{0});
    if (!json.at("validation_loss").is_null()) manifest.validation_loss = json.at("validation_loss").get<double>();
    for (const auto& file : json.at("files")) {
      ManifestFile entry{file.at("name").get<std::string>(), file.at("bytes").get<uint64_t>(),
                         std::stoull(file.at("xxh3").get<std::string>(), nullptr, 16)};
      TESSERA_CHECK(!entry.name.empty() && entry.name.find('/') == std::string::npos && entry.name != "..",
                    ErrorKind::kFormat, "file name '{}' leaves the folder", entry.name);
      manifest.files.push_back(std::move(entry));
    }
    for (const auto& [name, tensor] : json.at("tensors").items()) {
      manifest.tensors.emplace(name, parse_tensor(name, tensor, manifest.files.size()));
    }
    manifest.extra = json.at("extra");
    return manifest;
  } catch (const std::exception& error) {
    raise(ErrorKind::kFormat, "[checkpoint.load] {}: {}. The checkpoint is damaged; take an older one.", path.string(),
          error.what());
  }
}

uint64_t hash_file(const std::filesystem::path& path) {
  const auto file = MappedFile::open(path);
  return XXH3_64bits(file->bytes().data(), file->bytes().size());
}

}  // namespace tessera
