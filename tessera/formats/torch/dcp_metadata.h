// `.metadata` of a checkpoint of torch.distributed.checkpoint (DCP): which tensors and objects it holds, in which
// chunks, and in which record of which file each lies.
//
//   const auto metadata = DcpMetadata::parse(read_file(dir / ".metadata"), dir / ".metadata");
//   const DcpLookup lookup(metadata);
//   const DcpEntry& weight = lookup.at("model.w");
//   for (const DcpChunk& chunk : weight.tensor->chunks) {
//     const DcpStorageInfo& at = lookup.storage("model.w", chunk.offsets);   // file, byte offset, length
//   }
//   publish_file(dir / ".metadata", metadata.dump());
//
// parse() reads what torch 2.0 to 2.13 write with pickle protocols 2 to 5; nothing of it is executed. It checks
// everything that needs no other file: chunks inside their tensor, without overlap or gap, each with its record; paths
// that stay inside the folder. Takes n log n time. What it rejects is Error kFormat. dump() gives what torch 2.13 reads
// and what parses back equal; order is kept. Plain data. No communication. docs/format/torch.md describes the format.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

struct DcpChunk {
  std::vector<int64_t> offsets;  // of the first element in the whole tensor
  std::vector<int64_t> sizes;    // an empty chunk has a 0 among them
  bool operator==(const DcpChunk&) const = default;
};

struct DcpTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> size = {};  // of the whole
  std::vector<DcpChunk> chunks = {};
  bool requires_grad = false;
  bool pin_memory = false;
  int64_t memory_format = 0;  // 0 contiguous, 1 channels_last, 2 preserve; readers ignore it, as they do the two above
  bool operator==(const DcpTensor&) const = default;
};

// One name of state_dict_metadata: a tensor, or an object ("bytes") without one.
struct DcpEntry {
  std::string name;
  std::optional<DcpTensor> tensor = {};
  bool operator==(const DcpEntry&) const = default;
};

// Where a name lies in the nested state dict: ("opt", "param_groups", 0, "lr").
using DcpPath = std::vector<std::variant<std::string, int64_t>>;

// Names a record: of a chunk by its offset, of an object without one.
struct DcpIndex {
  std::string name;
  std::optional<std::vector<int64_t>> offset = {};
  std::optional<int64_t> index = {};  // position among the chunks, a hint only
  bool operator==(const DcpIndex&) const = default;
};

struct DcpStorageInfo {
  std::string relative_path;                            // "__0_0.distcp"
  uint64_t offset = 0;                                  // bytes
  uint64_t length = 0;                                  // bytes, as they lie in the file
  std::vector<std::string> transform_descriptors = {};  // "stream.zstd/1"; the reader undoes them in reverse
  bool operator==(const DcpStorageInfo&) const = default;
};

struct DcpStorageMeta {
  std::optional<std::string> checkpoint_id = {};
  bool checkpoint_id_is_path = false;  // a pathlib.PosixPath
  std::optional<std::string> save_id = {};
  std::optional<std::string> load_id = {};
  std::vector<std::string> modules = {};
  bool operator==(const DcpStorageMeta&) const = default;
};

struct DcpParseOptions {
  // For the `__RANK.metadata` of saves without collectives, which hold one rank's chunks: gaps are allowed.
  bool allow_gaps = false;
};

struct DcpMetadata {
  std::vector<DcpEntry> entries;
  // Nothing when the dict was saved flat, without paths.
  std::optional<std::vector<std::pair<std::string, DcpPath>>> planner_data;
  std::vector<std::pair<DcpIndex, DcpStorageInfo>> storage_data;
  std::optional<DcpStorageMeta> storage_meta;
  std::optional<std::string> version;
  bool operator==(const DcpMetadata&) const = default;

  static DcpMetadata parse(std::string_view bytes, const std::string& where, const DcpParseOptions& options = {});
  // Error kFormat for what parse() would reject.
  std::string dump(const DcpParseOptions& options = {}) const;
  // What parse() checks, for metadata that is made here. Error kFormat.
  void check(const std::string& where, const DcpParseOptions& options = {}) const;
};

// Finds entries by name and records by name and offset, in constant time. Borrows the metadata.
class DcpLookup {
 public:
  explicit DcpLookup(const DcpMetadata& metadata);
  // Null when there is none.
  const DcpEntry* find(std::string_view name) const;
  const DcpPath* find_path(std::string_view name) const;
  const DcpStorageInfo* find_storage(std::string_view name, const std::vector<int64_t>& offset) const;
  const DcpStorageInfo* find_storage(std::string_view name) const;  // of an object
  // Error kFormat when there is none.
  const DcpEntry& at(std::string_view name) const;
  const DcpStorageInfo& storage(std::string_view name, const std::vector<int64_t>& offset) const;
  const DcpStorageInfo& storage(std::string_view name) const;
  // Records of different names or offsets.
  size_t storage_size() const { return storage_.size(); }

 private:
  struct ChunkKey {
    std::string_view name;
    const std::vector<int64_t>* offset;  // null for an object
    bool operator==(const ChunkKey& other) const;
  };
  struct ChunkKeyHash {
    size_t operator()(const ChunkKey& key) const;
  };
  std::unordered_map<std::string_view, const DcpEntry*> entries_;
  std::unordered_map<std::string_view, const DcpPath*> paths_;
  std::unordered_map<ChunkKey, const DcpStorageInfo*, ChunkKeyHash> storage_;
};

}  // namespace tessera
