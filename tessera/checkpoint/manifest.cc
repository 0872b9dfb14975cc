#include "tessera/checkpoint/manifest.h"

#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/json.h"
#include "tessera/base/mapped_file.h"
#include "tessera/base/quote.h"
#include "tessera/formats/safetensors.h"

namespace tessera {
namespace {

constexpr const char* kFormatName = "tessera.checkpoint";
constexpr int kVersion = 1;

constexpr JsonLimits kLimits{.max_bytes = size_t{1} << 30, .max_depth = 64, .max_keys = 20'000'000};
constexpr int64_t kMaxElements = int64_t{1} << 58;  // so that their bytes fit 64 bits, too

int64_t volume(const std::string& name, const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) {
    if (size == 0) return 0;
    TESSERA_CHECK(elements <= kMaxElements / size, ErrorKind::kFormat, "{}: {} are too many elements", quote(name),
                  fmt::join(shape, " x "));
    elements *= size;
  }
  return elements;
}

bool overlap(const ManifestPart& a, const ManifestPart& b) {
  for (size_t d = 0; d < a.shape.size(); ++d) {
    if (a.offset[d] >= b.offset[d] + b.shape[d] || b.offset[d] >= a.offset[d] + a.shape[d]) return false;
  }
  return true;
}

// Boxes inside a tensor of as many elements as they have together cover it when no two of them share an element.
void check_disjoint(const std::string& name, const ManifestTensor& tensor) {
  constexpr size_t kMaxComparisons = 50'000'000;
  std::vector<const ManifestPart*> parts;
  for (const auto& part : tensor.parts) {
    if (volume(name, part.shape) > 0) parts.push_back(&part);
  }
  if (parts.size() < 2) return;
  // Sorted along the dimension with the most cuts, a part can only meet those that begin before it ends.
  size_t along = 0, most_cuts = 0;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    std::vector<int64_t> offsets;
    for (const auto* part : parts) offsets.push_back(part->offset[d]);
    std::sort(offsets.begin(), offsets.end());
    const auto cuts = static_cast<size_t>(std::unique(offsets.begin(), offsets.end()) - offsets.begin());
    if (cuts > most_cuts) along = d, most_cuts = cuts;
  }
  std::sort(parts.begin(), parts.end(),
            [&](const auto* a, const auto* b) { return a->offset[along] < b->offset[along]; });
  size_t comparisons = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t end = parts[i]->offset[along] + parts[i]->shape[along];
    for (size_t j = i + 1; j < parts.size() && parts[j]->offset[along] < end; ++j) {
      TESSERA_CHECK(++comparisons <= kMaxComparisons, ErrorKind::kFormat, "{}: {} parts are too many", quote(name),
                    parts.size());
      TESSERA_CHECK(!overlap(*parts[i], *parts[j]), ErrorKind::kFormat, "{}: the parts at {} and at {} overlap",
                    quote(name), fmt::join(parts[i]->offset, ","), fmt::join(parts[j]->offset, ","));
    }
  }
}

void check_box(const std::string& name, const ManifestTensor& tensor, const ManifestPart& part, size_t files) {
  bool ok = part.file < files && part.offset.size() == tensor.shape.size() && part.shape.size() == tensor.shape.size();
  ok = ok && (part.at.empty() || part.at.size() == tensor.shape.size());
  for (size_t d = 0; ok && d < tensor.shape.size(); ++d) {
    ok = part.offset[d] >= 0 && part.shape[d] >= 0 && part.offset[d] <= tensor.shape[d] - part.shape[d];
    ok = ok && (part.at.empty() || (part.at[d] >= 0 && part.at[d] <= tensor.shape[d] - part.shape[d]));
  }
  TESSERA_CHECK(ok, ErrorKind::kFormat, "{}: a part at {} of shape {} lies outside {}", quote(name),
                fmt::join(part.offset, ","), fmt::join(part.shape, ","), fmt::join(tensor.shape, ","));
}

void check_tensor(const std::string& name, const ManifestTensor& tensor, size_t files) {
  for (const int64_t size : tensor.shape) {
    TESSERA_CHECK(size >= 0 && size <= (int64_t{1} << 48), ErrorKind::kFormat, "{}: dim of {} elements", quote(name),
                  size);
  }
  const int64_t elements = volume(name, tensor.shape);
  int64_t covered = 0;
  for (const auto& part : tensor.parts) {
    check_box(name, tensor, part, files);
    covered += volume(name, part.shape);
    TESSERA_CHECK(covered <= elements, ErrorKind::kFormat, "{}: the parts hold more than its {} elements", quote(name),
                  elements);
  }
  TESSERA_CHECK(covered == elements, ErrorKind::kFormat, "{}: parts cover {} of {} elements", quote(name), covered,
                elements);
  check_disjoint(name, tensor);
}

ManifestTensor parse_tensor(const nlohmann::json& json) {
  ManifestTensor tensor;
  tensor.dtype = parse_safetensors_dtype(json.at("dtype").get<std::string>());
  tensor.shape = json.at("shape").get<std::vector<int64_t>>();
  for (const auto& part : json.at("parts")) tensor.parts.push_back(part_from_json(part));
  return tensor;
}

}  // namespace

nlohmann::json part_to_json(const ManifestPart& part) {
  nlohmann::json json = {{"file", part.file}, {"offset", part.offset}, {"shape", part.shape}};
  if (!part.at.empty()) json["at"] = part.at;
  return json;
}

ManifestPart part_from_json(const nlohmann::json& json) {
  ManifestPart part{.file = json.at("file").get<size_t>(),
                    .offset = json.at("offset").get<std::vector<int64_t>>(),
                    .shape = json.at("shape").get<std::vector<int64_t>>()};
  if (const auto at = json.find("at"); at != json.end()) part.at = at->get<std::vector<int64_t>>();
  return part;
}

void Manifest::check() const {
  for (const auto& [name, tensor] : tensors) check_tensor(name, tensor, files.size());
}

std::string Manifest::dump() const {
  nlohmann::ordered_json out = {
      {"format", kFormatName}, {"version", kVersion}, {"step", step}, {"world_size", world_size}};
  out["number"] = number;
  out["validation_loss"] = validation_loss ? nlohmann::json(*validation_loss) : nlohmann::json();
  for (const auto& file : files) {
    out["files"].push_back(
        {{"name", file.name}, {"bytes", file.size_bytes}, {"xxh3", fmt::format("{:016x}", file.xxh3)}});
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
    const nlohmann::json json = parse_json(text, "manifest", kLimits);
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
                    ErrorKind::kFormat, "file name {} leaves the folder", quote(entry.name));
      manifest.files.push_back(std::move(entry));
    }
    for (const auto& [name, tensor] : json.at("tensors").items()) {
      manifest.tensors.emplace(name, parse_tensor(tensor));
    }
    manifest.check();
    manifest.extra = json.at("extra");
    return manifest;
  } catch (const std::exception& error) {
    raise(ErrorKind::kFormat, "[checkpoint.load] {}: {}. The checkpoint is damaged; take an older one.", path.string(),
          escape(error.what(), 400));
  }
}

uint64_t hash_file(const std::filesystem::path& path) {
  const auto file = MappedFile::open(path);
  return XXH3_64bits(file->bytes().data(), file->bytes().size());
}

}  // namespace tessera
