#include "tessera/formats/torch/dcp_metadata.h"
#include "tessera/formats/torch/pickler.h"
#include "tessera/formats/torch/torch_dtypes.h"

namespace tessera {
namespace {

// The Python names used by a dump. Each is one node, so the pickle holds each name once.
struct DcpNames {
  static PickleValue of_metadata(const char* name) {
    return PickleValue::global("torch.distributed.checkpoint.metadata", name);
  }
  PickleValue metadata = of_metadata("Metadata");
  PickleValue tensor = of_metadata("TensorStorageMetadata");
  PickleValue properties = of_metadata("TensorProperties");
  PickleValue chunk = of_metadata("ChunkStorageMetadata");
  PickleValue bytes = of_metadata("BytesStorageMetadata");
  PickleValue index = of_metadata("MetadataIndex");
  PickleValue storage_meta = of_metadata("StorageMeta");
  PickleValue memory_format = of_metadata("_MEM_FORMAT_ENCODING");
  PickleValue storage_info = PickleValue::global("torch.distributed.checkpoint.filesystem", "_StorageInfo");
  PickleValue layout = PickleValue::global("torch.serialization", "_get_layout");
  PickleValue size = PickleValue::global("torch", "Size");
  PickleValue posix_path = PickleValue::global("pathlib", "PosixPath");
};

// Builds the tree of Python objects that torch's Metadata class has when it is pickled.
class DcpDumper {
 public:
  PickleValue metadata(const DcpMetadata& from) const {
    std::vector<PickleValue::Pair> entries, paths, storage;
    for (const auto& item : from.entries) entries.emplace_back(item.name, entry(item));
    if (from.planner_data) {
      for (const auto& [name, parts] : *from.planner_data) paths.emplace_back(name, path(parts));
    }
    for (const auto& [key, info] : from.storage_data) storage.emplace_back(index(key), storage_info(info));
    return PickleValue::instance(
        names_.metadata,
        PickleValue::dict({{"state_dict_metadata", PickleValue::dict(std::move(entries))},
                           {"planner_data", from.planner_data ? PickleValue::dict(std::move(paths)) : PickleValue()},
                           {"storage_data", PickleValue::dict(std::move(storage))},
                           {"storage_meta", from.storage_meta ? storage_meta(*from.storage_meta) : PickleValue()},
                           {"version", text_or_none(from.version)}}));
  }

 private:
  PickleValue size(const std::vector<int64_t>& values) const {
    std::vector<PickleValue> items(values.begin(), values.end());
    return PickleValue::call(names_.size, {PickleValue::tuple(std::move(items))});
  }
  static PickleValue text_or_none(const std::optional<std::string>& text) {
    return text ? PickleValue(*text) : PickleValue();
  }
  static PickleValue list_of(const std::vector<std::string>& texts) {
    return PickleValue::list({texts.begin(), texts.end()});
  }

  PickleValue entry(const DcpEntry& from) const {
    if (!from.tensor) return PickleValue::instance(names_.bytes, nullptr);
    const auto& tensor = *from.tensor;
    const auto properties = PickleValue::instance(
        names_.properties,
        PickleValue::tuple({PickleValue::global("torch", std::string(torch_dtype_name(tensor.dtype))),
                            PickleValue::call(names_.layout, {"torch.strided"}), tensor.requires_grad,
                            PickleValue::call(names_.memory_format, {tensor.memory_format}), tensor.pin_memory}));
    std::vector<PickleValue> chunks;
    chunks.reserve(tensor.chunks.size());
    for (const auto& chunk : tensor.chunks) {
      chunks.push_back(PickleValue::instance(
          names_.chunk, PickleValue::dict({{"offsets", size(chunk.offsets)}, {"sizes", size(chunk.sizes)}})));
    }
    return PickleValue::instance(names_.tensor, PickleValue::dict({{"properties", properties},
                                                                   {"size", size(tensor.size)},
                                                                   {"chunks", PickleValue::list(std::move(chunks))}}));
  }

  PickleValue path(const DcpPath& from) const {
    std::vector<PickleValue> parts;
    for (const auto& part : from) {
      parts.push_back(std::visit([](const auto& value) { return PickleValue(value); }, part));
    }
    return PickleValue::tuple(std::move(parts));
  }

  PickleValue index(const DcpIndex& from) const {
    std::vector<PickleValue::Pair> state{{"fqn", from.name},
                                         {"index", from.index ? PickleValue(*from.index) : PickleValue()}};
    if (from.offset) state.emplace_back("offset", size(*from.offset));
    return PickleValue::instance(names_.index, PickleValue::dict(std::move(state)));
  }

  PickleValue storage_info(const DcpStorageInfo& from) const {
    std::vector<PickleValue::Pair> state{{"relative_path", from.relative_path},
                                         {"offset", static_cast<int64_t>(from.offset)},
                                         {"length", static_cast<int64_t>(from.length)}};
    if (!from.transform_descriptors.empty()) {
      state.emplace_back("transform_descriptors", list_of(from.transform_descriptors));
    }
    return PickleValue::instance(names_.storage_info, PickleValue::dict(std::move(state)));
  }

  PickleValue storage_meta(const DcpStorageMeta& from) const {
    const bool is_path = from.checkpoint_id && from.checkpoint_id_is_path;
    return PickleValue::instance(names_.storage_meta,
                                 PickleValue::dict({{"checkpoint_id", is_path ? posix_path(*from.checkpoint_id)
                                                                              : text_or_none(from.checkpoint_id)},
                                                    {"save_id", text_or_none(from.save_id)},
                                                    {"load_id", text_or_none(from.load_id)},
                                                    {"modules", list_of(from.modules)}}));
  }

  // "/tmp/ckpt" becomes PosixPath("/", "tmp", "ckpt").
  PickleValue posix_path(const std::string& path) const {
    const auto slashes = std::min(path.find_first_not_of('/'), path.size());
    std::vector<PickleValue> parts;
    if (slashes > 0) parts.emplace_back(slashes == 2 ? "//" : "/");  // POSIX treats a leading "//" specially
    for (size_t at = slashes; at < path.size();) {
      const size_t slash = std::min(path.find('/', at), path.size());
      const auto part = path.substr(at, slash - at);
      if (!part.empty() && part != ".") parts.emplace_back(part);
      at = slash + 1;
    }
    return PickleValue::call(names_.posix_path, std::move(parts));
  }

  DcpNames names_;
};

}  // namespace

std::string DcpMetadata::dump(const DcpParseOptions& options) const {
  check("metadata to write", options);
  return pickle(DcpDumper().metadata(*this), {.protocol = 4});
}

}  // namespace tessera
