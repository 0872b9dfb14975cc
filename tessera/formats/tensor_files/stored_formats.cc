// The formats that TensorFiles::open() can read, one class for each.

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/warn_once.h"
#include "tessera/formats/detail/boxes.h"
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tessera/formats/torch/box_cover.h"
#include "tessera/formats/torch/dcp_folder.h"
#include "tessera/formats/torch/torch_save.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Format = TensorFiles::Format;

std::string count_of_files(const std::set<std::string>& names) {
  return names.size() == 1 ? *names.begin() : fmt::format("{} files", names.size());
}

// Matches e.g. shard-00001-model-00001-of-00002.safetensors.
bool is_shard_name(std::string_view name) {
  return name.starts_with("shard-") && name.find("-model-") != name.npos && name.ends_with(".safetensors");
}

class SafetensorsTensors : public TensorFiles {
 public:
  explicit SafetensorsTensors(const fs::path& path)
      : TensorFiles(Format::kSafetensors, path), folder_(SafetensorsFolder::open(path)) {
    for (const auto& [name, file] : folder_.files()) {
      const auto& entry = file->entry(name);
      tensors_[name] = {entry.dtype, entry.shape, file->path().filename().string()};
    }
  }

 private:
  void read_box(const std::string& name, c10::IntArrayRef offset, const at::Tensor& into) const override {
    std::vector<IndexRange> ranges;
    for (size_t d = 0; d < offset.size(); ++d) ranges.push_back({offset[d], offset[d] + into.sizes()[d]});
    into.copy_(folder_.read_slice(name, ranges));
  }
  SafetensorsFolder folder_;
};

// The offset of a tensor's shard in the whole tensor, from the metadata of DCP's HuggingFaceStorageWriter; zeros for a
// tensor without such metadata.
std::vector<int64_t> saved_offsets(const SafetensorsFile& file, const std::optional<Json>& info,
                                   const std::string& name, size_t dims) {
  const std::string where = fmt::format("[safetensors] {}: DCP_SHARDING_INFO", file.path().string());
  std::vector<int64_t> offsets(dims, 0);
  if (!info) return offsets;
  const JsonReader reader(*info, where);
  constexpr int64_t kMost = int64_t{1} << 48;
  if (reader.has(name)) offsets = reader.at(name).integers("saved_offsets", 0, kMost);
  TESSERA_CHECK(offsets.size() == dims, ErrorKind::kFormat, "{}: {} has {} dims and {} offsets", where, quote(name),
                dims, offsets.size());
  return offsets;
}

class ShardedSafetensors : public TensorFiles {
 public:
  // Opens all shards and derives the shape of each whole tensor from the ends of its shards: a size is the largest end
  // in that dim. No file stores the whole shape.
  explicit ShardedSafetensors(const fs::path& folder) : TensorFiles(Format::kSafetensorsShards, folder) {
    std::set<fs::path> names;
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (is_shard_name(entry.path().filename().string())) names.insert(entry.path());
    }
    check_numbers(names);
    for (const auto& name : names) add(SafetensorsFile::open(name));
    for (const auto& [name, parts] : parts_) check(name, parts);
  }

 private:
  struct TensorShard {
    DcpChunk box;
    std::shared_ptr<const SafetensorsFile> file;
  };

  // The names of the shard files contain the rank but not the number of ranks. This function finds that the files of a
  // rank are missing if files of a higher rank exist. If the files of the last ranks are missing, this is found only if
  // a tensor then has a gap.
  void check_numbers(const std::set<fs::path>& names) const {
    std::set<std::string> ranks;  // "00001" of shard-00001-model-...
    for (const auto& name : names) ranks.insert(name.filename().string().substr(6, 5));
    int number = 0;
    for (const auto& rank : ranks) {
      TESSERA_CHECK(rank == fmt::format("{:05}", ++number), ErrorKind::kFormat,
                    "[safetensors] {}: the shards of rank {} are missing; found those of {}", path().string(), number,
                    quote(rank));
    }
    log_info("[safetensors] {}: shards of {} ranks; their names do not say whether there were more", path().string(),
             number);
  }

  void add(const std::shared_ptr<const SafetensorsFile>& file) {
    constexpr JsonLimits kLimits{.max_bytes = size_t{1} << 28, .max_depth = 8, .max_keys = 10'000'000};
    std::optional<Json> info;
    const auto found = file->metadata().find("DCP_SHARDING_INFO");
    if (found != file->metadata().end()) {
      info = parse_json_object(found->second, "[safetensors] " + file->path().string(), kLimits);
    }
    for (const auto& [name, entry] : file->entries()) {
      TensorShard part{{saved_offsets(*file, info, name, entry.shape.size()), entry.shape}, file};
      auto& stored = tensors_[name];
      auto& parts = parts_[name];
      if (parts.empty()) stored = {entry.dtype, std::vector<int64_t>(entry.shape.size(), 0), {}};
      TESSERA_CHECK(stored.dtype == entry.dtype && stored.shape.size() == entry.shape.size(), ErrorKind::kFormat,
                    "[safetensors] {}: {} has another dtype or number of dims than in another shard",
                    file->path().string(), quote(name));
      for (size_t d = 0; d < entry.shape.size(); ++d) {
        TESSERA_CHECK(entry.shape[d] <= int64_t{1} << 48, ErrorKind::kFormat,
                      "[safetensors] {}: {}: a dim of {} elements is too large, at most 2^48 are read",
                      file->path().string(), quote(name), entry.shape[d]);
        stored.shape[d] = std::max(stored.shape[d], part.box.offsets[d] + entry.shape[d]);
      }
      parts.push_back(std::move(part));
    }
  }

  // Checks that the shards of a tensor cover its shape, which add() derived from the ends of the shards, without gap or
  // overlap.
  void check(const std::string& name, const std::vector<TensorShard>& parts) {
    auto& stored = tensors_[name];
    std::set<std::string> files;
    std::vector<DcpChunk> boxes;
    for (const auto& part : parts) {
      files.insert(part.file->path().filename().string());
      boxes.push_back(part.box);
    }
    stored.file = count_of_files(files);
    const auto where = fmt::format("[safetensors] {}: {}", path().string(), quote(name));
    const auto defect = find_cover_defect(stored.shape, boxes, where);
    TESSERA_CHECK(!defect, ErrorKind::kFormat, "{}: the shards {}. A shard is missing or from another save.", where,
                  defect && defect->covered_by == 0 ? "leave a gap" : "overlap");
  }

  void read_box(const std::string& name, c10::IntArrayRef offset, const at::Tensor& into) const override {
    for (const auto& part : parts_.at(name)) {
      detail::copy_intersection(part.file->tensor(name), part.box.offsets, into, offset);
    }
  }

  std::map<std::string, std::vector<TensorShard>> parts_;
};

class DcpTensors : public TensorFiles {
 public:
  DcpTensors(const fs::path& folder, const TensorFilesOptions& options)
      : TensorFiles(Format::kDcp, folder), folder_(DcpFolder::open(folder)) {
    const auto& metadata = folder_->metadata();
    const DcpLookup lookup(metadata);
    // Returns the name of a tensor in the dict "model" without the prefix "model."; an empty string for other names.
    const auto weight_name = [&](const std::string& name) -> std::string {
      constexpr std::string_view kModel = "model.";
      const auto* path = lookup.find_path(name);
      const bool is_weight = path && path->size() > 1 && path->front() == DcpPath::value_type("model");
      return is_weight && name.starts_with(kModel) ? name.substr(kModel.size()) : "";
    };
    const bool has_model = std::ranges::any_of(
        metadata.entries, [&](const DcpEntry& entry) { return entry.tensor && !weight_name(entry.name).empty(); });
    for (const auto& entry : metadata.entries) {
      const auto name = options.weights_only && has_model ? weight_name(entry.name) : entry.name;
      if (!entry.tensor || name.empty()) continue;
      std::set<std::string> files;
      for (const auto& chunk : entry.tensor->chunks) {
        files.insert(lookup.storage(entry.name, chunk.offsets).relative_path);
      }
      tensors_[name] = {entry.tensor->dtype, entry.tensor->size, count_of_files(files)};
      keys_[name] = entry.name;
    }
  }

 private:
  void read_box(const std::string& name, c10::IntArrayRef offset, const at::Tensor& into) const override {
    folder_->read(keys_.at(name), offset, into);
  }
  std::shared_ptr<const DcpFolder> folder_;
  std::map<std::string, std::string> keys_;  // name in the checkpoint, by name in tensors_
};

class TorchSaveTensors : public TensorFiles {
 public:
  TorchSaveTensors(const fs::path& path, const TensorFilesOptions& options)
      : TensorFiles(Format::kTorchSave, path), options_(options) {
    for (const auto& file : files_of(path)) add(TorchSaveFile::open(file), file.filename().string());
  }

 private:
  struct TensorLocation {
    std::shared_ptr<const TorchSaveFile> file;
    TorchTensorInfo info;
  };
  static constexpr int kMaxDepth = 32;

  static std::set<fs::path> files_of(const fs::path& path) {
    if (!fs::is_directory(path)) return {path};
    if (fs::exists(path / "pytorch_model.bin")) {
      if (fs::exists(path / "pytorch_model.bin.index.json")) {
        log_warning_once(
            "[torch] {}: is read, and the shards of pytorch_model.bin.index.json are ignored, as in "
            "transformers. Delete the files that are out of date.",
            (path / "pytorch_model.bin").string());
      }
      return {path / "pytorch_model.bin"};
    }
    constexpr JsonLimits kLimits{.max_bytes = size_t{1} << 28, .max_depth = 8, .max_keys = 10'000'000};
    const auto index_path = path / "pytorch_model.bin.index.json";
    const Json index =
        parse_json_object(read_file(index_path, kLimits.max_bytes), "[torch] " + index_path.string(), kLimits);
    std::set<fs::path> files;
    for (const auto& [name, shard] : JsonReader(index, "[torch] " + index_path.string()).at("weight_map").members()) {
      const auto file = shard.as_string();
      TESSERA_CHECK(!file.empty() && file.find('/') == std::string::npos && file != "..", ErrorKind::kFormat,
                    "[torch] {}: the file {} leads outside the folder", index_path.string(), quote(file));
      files.insert(path / file);
    }
    return files;
  }

  void add(const std::shared_ptr<const TorchSaveFile>& file, const std::string& file_name) {
    const auto* root = &file->root();
    if (options_.weights_only && root->kind() == PickleKind::kDict) {
      for (const auto* name : {"model", "state_dict", "model_state_dict"}) {
        const auto* inner = root->find(name);
        if (!inner || inner->kind() != PickleKind::kDict) continue;
        root = inner;
        break;
      }
    }
    walk(file, file_name, *root, "", 0);
  }

  // Collects the tensors below a value. A name is the path of keys and list positions; other keys than texts and
  // integers are skipped.
  void walk(const std::shared_ptr<const TorchSaveFile>& file, const std::string& file_name, const PickleValue& value,
            const std::string& name, int depth) {
    if (const auto* info = file->find_tensor(value)) {
      const auto [found, is_new] = tensors_.try_emplace(name, StoredTensor{info->dtype, info->sizes, file_name});
      TESSERA_CHECK(is_new, ErrorKind::kFormat, "[torch] {}: two tensors are called {}", path().string(), quote(name));
      locations_[name] = {file, *info};
      return;
    }
    TESSERA_CHECK(depth < kMaxDepth, ErrorKind::kFormat, "[torch] {}: nested deeper than {}", path().string(),
                  kMaxDepth);
    const auto below = [&](const std::string& part) { return name.empty() ? part : name + "." + part; };
    if (value.kind() == PickleKind::kDict) {
      for (size_t i = 0; i < value.dict_size(); ++i) {
        const auto& key = value.key(i);
        if (key.kind() != PickleKind::kText && key.kind() != PickleKind::kInt) continue;
        const auto part = key.kind() == PickleKind::kText ? key.as_text() : std::to_string(key.as_int());
        walk(file, file_name, value.value(i), below(part), depth + 1);
      }
    } else if (value.kind() == PickleKind::kList || value.kind() == PickleKind::kTuple) {
      for (size_t i = 0; i < value.items().size(); ++i) {
        walk(file, file_name, value.items()[i], below(std::to_string(i)), depth + 1);
      }
    }
  }

  void read_box(const std::string& name, c10::IntArrayRef offset, const at::Tensor& into) const override {
    const auto& location = locations_.at(name);
    // The checksum covers the whole storage, so it is compared only when the whole storage is read.
    const bool all_of_storage = location.info.nbytes() == location.info.storage_end - location.info.storage_begin;
    if (all_of_storage && into.sizes() == at::IntArrayRef(location.info.sizes)) location.file->check_crc(location.info);
    detail::copy_intersection(location.file->tensor(location.info), std::vector<int64_t>(offset.size(), 0), into,
                              offset);
  }

  TensorFilesOptions options_;
  std::map<std::string, TensorLocation> locations_;
};

bool holds_sharded_safetensors(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (is_shard_name(entry.path().filename().string())) return true;
  }
  return false;
}

// A zip archive (the format of torch.save since 1.6) begins with a local file header.
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

bool TensorFiles::has_tensors(const fs::path& path) {
  if (!fs::is_directory(path)) return fs::is_regular_file(path);
  return has_safetensors(path) || DcpFolder::is_dcp_folder(path) || has_torch_save(path) ||
         holds_sharded_safetensors(path);
}

// A folder may hold several formats, for example weights of a finished run next to .metadata. The order of these tests
// decides: safetensors, DCP, torch.save, shards of safetensors.
std::shared_ptr<const TensorFiles> TensorFiles::open(const fs::path& path, const TensorFilesOptions& options) {
  TESSERA_CHECK(fs::exists(path), ErrorKind::kIo, "[formats] {}: does not exist", path.string());
  const bool is_file = !fs::is_directory(path);
  if (is_file && begins_like_zip(path)) return std::make_shared<TorchSaveTensors>(path, options);
  if (is_file || has_safetensors(path)) return std::make_shared<SafetensorsTensors>(path);
  if (DcpFolder::is_dcp_folder(path)) return std::make_shared<DcpTensors>(path, options);
  if (has_torch_save(path)) return std::make_shared<TorchSaveTensors>(path, options);
  if (holds_sharded_safetensors(path)) return std::make_shared<ShardedSafetensors>(path);
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

}  // namespace tessera
