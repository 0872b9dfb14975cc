// The file `.metadata` of a checkpoint of torch.distributed.checkpoint (DCP): the tensors and objects of the
// checkpoint, the chunks of each tensor, and the file and record that hold each chunk.
//
//   const auto metadata = DcpMetadata::parse(read_file(dir / ".metadata"), dir / ".metadata");
//   const DcpLookup lookup(metadata);
//   const DcpEntry& weight = lookup.at("model.w");
//   for (const DcpChunk& chunk : weight.tensor->chunks) {
//     const DcpStorageInfo& at = lookup.storage("model.w", chunk.offsets);   // file, byte offset, length
//   }
//   publish_file(dir / ".metadata", metadata.dump());
//
// parse() reads the files of torch 2.0 to 2.13 with pickle protocols 2 to 5; no code of a file is executed. It checks
// everything that needs no other file: chunks are inside their tensor, without overlap or gap, and each has its record;
// paths stay inside the folder. It takes n log n time. Invalid metadata is Error kFormat. dump() writes a file that
// torch 2.13 reads and that parse() reads back as an equal value; order is kept. Plain data. No communication.
// docs/format/torch.md describes the format.
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
  std::vector<int64_t> offsets;  // index of the chunk's first element in the whole tensor
  std::vector<int64_t> sizes;    // a 0 among the sizes: an empty chunk
  bool operator==(const DcpChunk&) const = default;
};

struct DcpTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> size = {};  // of the whole tensor
  std::vector<DcpChunk> chunks = {};
  bool requires_grad = false;
  bool pin_memory = false;
  int64_t memory_format = 0;  // 0 contiguous, 1 channels_last, 2 preserve; readers ignore this and the two fields above
  bool operator==(const DcpTensor&) const = default;
};

// One entry of state_dict_metadata. DcpEntry::tensor is set for a tensor, and nullopt for an object ("bytes").
struct DcpEntry {
  std::string name;
  std::optional<DcpTensor> tensor = {};
  bool operator==(const DcpEntry&) const = default;
};

// The path of a name in the nested state dict: ("opt", "param_groups", 0, "lr").
using DcpPath = std::vector<std::variant<std::string, int64_t>>;

// The key of a record: name and offset for a chunk of a tensor, name alone for an object.
struct DcpIndex {
  std::string name;
  std::optional<std::vector<int64_t>> offset = {};
  std::optional<int64_t> index = {};  // position among the chunks, a hint only
  bool operator==(const DcpIndex&) const = default;
};

struct DcpStorageInfo {
  std::string relative_path;                            // "__0_0.distcp"
  uint64_t offset = 0;                                  // bytes
  uint64_t length = 0;                                  // bytes in the file
  std::vector<std::string> transform_descriptors = {};  // "stream.zstd/1"; a reader undoes them in reverse order
  bool operator==(const DcpStorageInfo&) const = default;
};

struct DcpStorageMeta {
  std::optional<std::string> checkpoint_id = {};
  bool checkpoint_id_is_path = false;  // the file has it as a pathlib.PosixPath
  std::optional<std::string> save_id = {};
  std::optional<std::string> load_id = {};
  std::vector<std::string> modules = {};
  bool operator==(const DcpStorageMeta&) const = default;
};

struct DcpParseOptions {
  // If true, the chunks need not cover their tensors: the `__RANK.metadata` files of saves without collectives list
  // only the chunks of one rank.
  bool allow_gaps = false;
};

struct DcpMetadata {
  std::vector<DcpEntry> entries;
  // The path of each name in the nested state dict; nullopt when the state dict was saved flat.
  std::optional<std::vector<std::pair<std::string, DcpPath>>> planner_data;
  std::vector<std::pair<DcpIndex, DcpStorageInfo>> storage_data;
  std::optional<DcpStorageMeta> storage_meta;
  std::optional<std::string> version;
  bool operator==(const DcpMetadata&) const = default;

  static DcpMetadata parse(std::string_view bytes, const std::string& where, const DcpParseOptions& options = {});
  // Returns the bytes of a `.metadata` file. Error kFormat for metadata that parse() would reject.
  std::string dump(const DcpParseOptions& options = {}) const;
  // Runs the checks that parse() runs, for metadata that was not parsed from a file. Error kFormat.
  void check(const std::string& where, const DcpParseOptions& options = {}) const;
};

// Finds entries by name, and records by name and offset, in constant time. The metadata must outlive the lookup.
class DcpLookup {
 public:
  explicit DcpLookup(const DcpMetadata& metadata);
  // These functions return null when the name or chunk does not exist.
  const DcpEntry* find(std::string_view name) const;
  const DcpPath* find_path(std::string_view name) const;
  const DcpStorageInfo* find_storage(std::string_view name, const std::vector<int64_t>& offset) const;
  const DcpStorageInfo* find_storage(std::string_view name) const;  // of an object
  // These functions throw Error kFormat when the name or chunk does not exist.
  const DcpEntry& at(std::string_view name) const;
  const DcpStorageInfo& storage(std::string_view name, const std::vector<int64_t>& offset) const;
  const DcpStorageInfo& storage(std::string_view name) const;
  // The number of records; records with the same name and the same offset count as one.
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
