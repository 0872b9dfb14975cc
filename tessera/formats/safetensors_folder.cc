#include "tessera/formats/safetensors_folder.h"

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/formats/detail/quote_name.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
constexpr size_t kMaxIndexBytes = size_t{256} << 20;

bool lies_in(const fs::path& file, const fs::path& folder) {
  const auto relative = file.lexically_relative(folder);
  return !relative.empty() && *relative.begin() != "..";
}

// The shard's path. A name with a folder in it, or a link that leads elsewhere, is refused.
fs::path shard_path(const fs::path& dir, const std::string& name, const std::string& index_name) {
  const fs::path shard(name);
  const bool plain = !name.empty() && !shard.is_absolute() && shard == shard.filename() && name != ".." &&
                     name != "." && name.find('\0') == std::string::npos;
  TESSERA_CHECK(plain, ErrorKind::kFormat, "[safetensors] {}: names the file {}, wanted a file of this folder",
                index_name, detail::quote_name(name));
  TESSERA_CHECK(fs::exists(dir / shard), ErrorKind::kIo,
                "[safetensors] {}: names the file {}, which is not there. Fetch the folder again.", index_name,
                detail::quote_name(name));
  std::error_code error;
  const auto real_dir = fs::canonical(dir, error);
  const auto real_file = fs::canonical(dir / shard, error);
  const bool hub_cache = real_dir.parent_path().filename() == "snapshots" &&
                         lies_in(real_file, real_dir.parent_path().parent_path() / "blobs");
  TESSERA_CHECK(!error && (lies_in(real_file, real_dir) || hub_cache), ErrorKind::kFormat,
                "[safetensors] {}: the file {} leads outside the folder, to {}", index_name, detail::quote_name(name),
                real_file.string());
  return dir / shard;
}

nlohmann::json parse_index(const fs::path& path) {
  auto index = nlohmann::json::parse(read_file(path, kMaxIndexBytes), nullptr, false);
  TESSERA_CHECK(index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(),
                ErrorKind::kFormat, "[safetensors] {}: is no JSON object with a 'weight_map' object", path.string());
  return index["weight_map"];
}

}  // namespace

SafetensorsFolder SafetensorsFolder::open(const fs::path& dir) {
  SafetensorsFolder result;
  result.dir_ = dir;
  const auto single = fs::is_directory(dir) ? dir / "model.safetensors" : dir;
  const auto index_path = dir / "model.safetensors.index.json";
  if (fs::exists(single)) {
    const auto file = SafetensorsFile::open(single);
    for (const auto& [name, entry] : file->entries()) result.files_.emplace(name, file);
    return result;
  }
  TESSERA_CHECK(fs::exists(index_path), ErrorKind::kIo,
                "[safetensors] {}: holds neither model.safetensors nor model.safetensors.index.json", dir.string());
  std::map<std::string, std::shared_ptr<const SafetensorsFile>> shards;
  const auto weight_map = parse_index(index_path);
  for (const auto& [name, shard] : weight_map.items()) {
    TESSERA_CHECK(shard.is_string(), ErrorKind::kFormat, "[safetensors] {}: tensor {} names no file",
                  index_path.string(), detail::quote_name(name));
    const auto& shard_name = shard.get_ref<const std::string&>();
    auto& file = shards[shard_name];
    if (!file) file = SafetensorsFile::open(shard_path(dir, shard_name, index_path.string()));
    TESSERA_CHECK(file->contains(name), ErrorKind::kFormat, "[safetensors] {}: tensor {} is not in {}, which it names",
                  index_path.string(), detail::quote_name(name), detail::quote_name(shard_name));
    result.files_.emplace(name, file);
  }
  return result;
}

const SafetensorsFile& SafetensorsFolder::file_of(std::string_view name) const {
  const auto found = files_.find(name);
  TESSERA_CHECK(found != files_.end(), ErrorKind::kFormat,
                "[safetensors] {}: holds no tensor {}. List the folder with 'tessera ckpt ls PATH'.", dir_.string(),
                detail::quote_name(name));
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
