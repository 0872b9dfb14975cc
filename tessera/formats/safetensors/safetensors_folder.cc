#include "tessera/formats/safetensors/safetensors_folder.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/warn_once.h"
#include "tessera/formats/folder_links.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
constexpr JsonLimits kIndexLimits{.max_bytes = size_t{256} << 20, .max_depth = 16, .max_keys = 4'000'000};

// The path of a shard. A name with a folder in it, and a link out of the folder, are rejected.
fs::path shard_path(const fs::path& dir, const std::string& name, const std::string& index_name) {
  const fs::path shard(name);
  const bool plain = !name.empty() && !shard.is_absolute() && shard == shard.filename() && name != ".." &&
                     name != "." && name.find('\0') == std::string::npos;
  TESSERA_CHECK(plain, ErrorKind::kFormat, "[safetensors] {}: names the file {}, wanted a file of this folder",
                index_name, quote(name));
  TESSERA_CHECK(fs::exists(dir / shard), ErrorKind::kIo,
                "[safetensors] {}: names the file {}, which is not there. Fetch the folder again.", index_name,
                quote(name));
  const auto place = resolve_links(dir, shard);
  TESSERA_CHECK(place.is_inside, ErrorKind::kFormat, "[safetensors] {}: the file {} leads outside the folder, to {}",
                index_name, quote(name), place.real.string());
  return dir / shard;
}

std::vector<std::pair<std::string, JsonReader>> weight_map(const Json& index, const fs::path& path) {
  return JsonReader(index, "[safetensors] " + path.string()).at("weight_map").members();
}

Json read_index(const fs::path& path) {
  return parse_json_object(read_file(path, kIndexLimits.max_bytes), "[safetensors] " + path.string(), kIndexLimits);
}

// Whether every tensor of the index is stored in the file `name`. False for an invalid index.
bool names_only_file(const fs::path& index_path, const std::string& name) {
  try {
    const Json index = read_index(index_path);
    const auto map = weight_map(index, index_path);
    return std::ranges::all_of(map, [&](const auto& entry) { return entry.second.as_string() == name; });
  } catch (const Error&) {
    return false;
  }
}

// Warns when a folder has model.safetensors and also an index of other files, for example because two saves wrote into
// it. model.safetensors is read, as in transformers.
void warn_of_unused_index(const fs::path& single, const fs::path& index_path) {
  if (!fs::is_regular_file(index_path)) return;
  if (names_only_file(index_path, single.filename().string())) return;
  log_warning_once(
      "[safetensors] {}: is read, and the shards of {} in the same folder are ignored, as in transformers. Delete the "
      "files that are out of date.",
      single.string(), index_path.filename().string());
}

}  // namespace

// The index decides the file of each tensor. Each shard is opened once and must hold the tensors that the index lists.
SafetensorsFolder SafetensorsFolder::open(const fs::path& dir) {
  SafetensorsFolder result;
  result.dir_ = dir;
  const auto single = fs::is_directory(dir) ? dir / "model.safetensors" : dir;
  const auto index_path = dir / "model.safetensors.index.json";
  if (fs::exists(single)) {
    if (fs::is_directory(dir)) warn_of_unused_index(single, index_path);
    const auto file = SafetensorsFile::open(single);
    for (const auto& [name, entry] : file->entries()) result.files_.emplace(name, file);
    return result;
  }
  TESSERA_CHECK(fs::exists(index_path), ErrorKind::kIo,
                "[safetensors] {}: holds neither model.safetensors nor model.safetensors.index.json", dir.string());
  std::map<std::string, std::shared_ptr<const SafetensorsFile>> shards;
  const Json index = read_index(index_path);
  for (const auto& [name, shard] : weight_map(index, index_path)) {
    const auto shard_name = shard.as_string();
    auto& file = shards[shard_name];
    if (!file) file = SafetensorsFile::open(shard_path(dir, shard_name, index_path.string()));
    TESSERA_CHECK(file->contains(name), ErrorKind::kFormat, "[safetensors] {}: tensor {} is not in {}, which it names",
                  index_path.string(), quote(name), quote(shard_name));
    result.files_.emplace(name, file);
  }
  return result;
}

const SafetensorsFile& SafetensorsFolder::file_of(std::string_view name) const {
  const auto found = files_.find(name);
  TESSERA_CHECK(found != files_.end(), ErrorKind::kFormat,
                "[safetensors] {}: holds no tensor {}. List the folder with 'tessera ckpt ls PATH'.", dir_.string(),
                quote(name));
  return *found->second;
}

at::Tensor SafetensorsFolder::tensor(std::string_view name) const { return file_of(name).tensor(name); }

at::Tensor SafetensorsFolder::read_rows(std::string_view name, int64_t begin, int64_t end) const {
  return file_of(name).read_rows(name, begin, end);
}

at::Tensor SafetensorsFolder::read_slice(std::string_view name, std::span<const IndexRange> ranges) const {
  return file_of(name).read_slice(name, ranges);
}

}  // namespace tessera
