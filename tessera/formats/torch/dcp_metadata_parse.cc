#include <array>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/torch/dcp_metadata.h"
#include "tessera/formats/torch/torch_dtypes.h"
#include "tessera/formats/torch/unpickler.h"

namespace tessera {
namespace {

constexpr const char* kDcpClasses = "torch.distributed.checkpoint.metadata.";

// Reads DcpMetadata from the pickled tree. Every error message contains `where` and names the value by `at`, its name
// or field. Members that some versions of torch do not write are optional.
//
// torch pickles Metadata and its parts as instances with a dict of their fields as state. The three main fields are
// dicts: state_dict_metadata (name to TensorStorageMetadata or BytesStorageMetadata), planner_data (name to path) and
// storage_data (MetadataIndex to _StorageInfo).
class DcpParser {
 public:
  explicit DcpParser(const std::string& where) : where_(where) {}

  DcpMetadata metadata(const PickleValue& root) {
    const auto* state = state_of(root, kDcpClasses + std::string("Metadata"), "the whole");
    const auto& entries = member(state, "state_dict_metadata", "the whole");
    expect_kind(entries, PickleKind::kDict, "state_dict_metadata", "a dict");
    DcpMetadata found;
    found.entries.reserve(entries.dict_size());
    for (size_t i = 0; i < entries.dict_size(); ++i) {
      found.entries.push_back(entry(text(entries.key(i), "state_dict_metadata"), entries.value(i)));
    }
    const auto* paths = optional_member(state, "planner_data");
    if (paths && !paths->is_none()) {
      expect_kind(*paths, PickleKind::kDict, "planner_data", "a dict");
      found.planner_data.emplace();
      for (size_t i = 0; i < paths->dict_size(); ++i) {
        const auto& name = text(paths->key(i), "planner_data");
        found.planner_data->emplace_back(name, path(name, paths->value(i)));
      }
    }
    const auto& storage = member(state, "storage_data", "the whole");
    expect_kind(storage, PickleKind::kDict, "storage_data", "a dict");
    found.storage_data.reserve(storage.dict_size());
    for (size_t i = 0; i < storage.dict_size(); ++i) {
      auto key = index(storage.key(i));
      auto info = storage_info(storage.value(i), key.name);
      found.storage_data.emplace_back(std::move(key), std::move(info));
    }
    const auto* meta = optional_member(state, "storage_meta");
    if (meta && !meta->is_none()) found.storage_meta = storage_meta(*meta);
    found.version = optional_text(optional_member(state, "version"), "version");
    return found;
  }

 private:
  template <class... Args>
  [[noreturn]] void fail(std::string_view at, fmt::format_string<Args...> format, Args&&... args) const {
    raise(ErrorKind::kFormat, "[dcp] {}: {}: {}", where_, quote(at), fmt::format(format, std::forward<Args>(args)...));
  }
  void expect_kind(const PickleValue& value, PickleKind kind, std::string_view at, const char* expected) const {
    if (value.kind() != kind) fail(at, "found {}, wanted {}", value.describe(), expected);
  }

  // Returns the pickled state (PickleValue::state()) of `value`, which must be an instance of the class `class_name`;
  // null for an instance without a state. Error kFormat if `value` is anything else.
  const PickleValue* state_of(const PickleValue& value, std::string_view class_name, std::string_view at) const {
    if (!value.is_instance() || value.qualified_name() != class_name) {
      fail(at, "found {}, wanted a {}", value.describe(), class_name);
    }
    if (value.state().is_none()) return nullptr;
    return &value.state();
  }

  const PickleValue& member(const PickleValue* state, const char* key, std::string_view at) const {
    const auto* found = optional_member(state, key);
    if (!found) fail(at, "{} is missing", key);
    return *found;
  }

  const PickleValue* optional_member(const PickleValue* state, const char* key) const {
    return state && state->kind() == PickleKind::kDict ? state->find(key) : nullptr;
  }

  const std::string& text(const PickleValue& value, std::string_view at) const {
    expect_kind(value, PickleKind::kText, at, "text");
    return value.as_text();
  }

  std::optional<std::string> optional_text(const PickleValue* value, std::string_view at) const {
    if (!value || value->is_none()) return std::nullopt;
    return text(*value, at);
  }

  bool boolean(const PickleValue& value, std::string_view at) const {
    expect_kind(value, PickleKind::kBool, at, "True or False");
    return value.as_bool();
  }

  // An integer of 0 or more. Error kFormat for other values.
  int64_t count(const PickleValue& value, std::string_view at) const {
    expect_kind(value, PickleKind::kInt, at, "an integer");
    if (value.as_int() < 0) fail(at, "found {}, wanted 0 or more", value.as_int());
    return value.as_int();
  }

  std::vector<int64_t> size(const PickleValue& value, std::string_view at) const {
    const bool is_size = value.is_object("torch.Size") && value.args().size() == 1;
    const auto& items = is_size ? value.args()[0] : value;
    if (items.kind() != PickleKind::kTuple && items.kind() != PickleKind::kList) {
      fail(at, "found {}, wanted a torch.Size", value.describe());
    }
    std::vector<int64_t> sizes;
    sizes.reserve(items.items().size());
    for (const auto& item : items.items()) sizes.push_back(count(item, at));
    return sizes;
  }

  std::vector<std::string> texts(const PickleValue* value, std::string_view at) const {
    std::vector<std::string> found;
    if (!value || value->is_none()) return found;
    if (value->kind() != PickleKind::kList && value->kind() != PickleKind::kTuple) {
      fail(at, "found {}, wanted a list of texts", value->describe());
    }
    for (const auto& item : value->items()) found.push_back(text(item, at));
    return found;
  }

  DcpEntry entry(const std::string& name, const PickleValue& value) const {
    DcpEntry found{name, std::nullopt};
    if (value.is_object(kDcpClasses + std::string("BytesStorageMetadata"))) return found;
    const auto* state = state_of(value, kDcpClasses + std::string("TensorStorageMetadata"), name);
    found.tensor.emplace();
    properties(member(state, "properties", name), name, *found.tensor);
    found.tensor->size = size(member(state, "size", name), name);
    const auto& chunks = member(state, "chunks", name);
    expect_kind(chunks, PickleKind::kList, name, "a list of chunks");
    found.tensor->chunks.reserve(chunks.items().size());
    for (const auto& item : chunks.items()) found.tensor->chunks.push_back(chunk(item, name));
    return found;
  }

  // TensorProperties is pickled as a tuple of five values (its __getstate__) or as a plain dict.
  void properties(const PickleValue& value, std::string_view at, DcpTensor& tensor) const {
    const auto* state = state_of(value, kDcpClasses + std::string("TensorProperties"), at);
    if (!state) fail(at, "properties without a state");
    std::array<const PickleValue*, 5> parts{};
    if (state->kind() == PickleKind::kTuple) {
      if (state->items().size() != parts.size()) fail(at, "{} properties, wanted 5", state->items().size());
      for (size_t i = 0; i < parts.size(); ++i) parts[i] = &state->items()[i];
    } else {
      constexpr std::array kKeys = {"dtype", "layout", "requires_grad", "memory_format", "pin_memory"};
      for (size_t i = 0; i < parts.size(); ++i) parts[i] = optional_member(state, kKeys[i]);
      if (!parts[0]) fail(at, "dtype is missing");
    }
    tensor.dtype = dtype(*parts[0], at);
    if (parts[1]) {
      const auto& layout = *parts[1];
      const bool strided = layout.is_object("torch.serialization._get_layout") && layout.args().size() == 1 &&
                           layout.args()[0].kind() == PickleKind::kText &&
                           layout.args()[0].as_text() == "torch.strided";
      if (!strided) fail(at, "a tensor that is not strided; only dense tensors are read");
    }
    if (parts[2]) tensor.requires_grad = boolean(*parts[2], at);
    if (parts[3]) tensor.memory_format = memory_format(*parts[3], at);
    if (parts[4]) tensor.pin_memory = boolean(*parts[4], at);
  }

  c10::ScalarType dtype(const PickleValue& value, std::string_view at) const {
    const bool of_torch = value.kind() == PickleKind::kGlobal && value.global_module() == "torch";
    const auto dtype = of_torch ? find_torch_dtype(value.global_name()) : std::nullopt;
    if (!dtype) fail(at, "found {}, wanted a dtype", value.describe());
    return *dtype;
  }

  int64_t memory_format(const PickleValue& value, std::string_view at) const {
    const bool known = value.is_object(kDcpClasses + std::string("_MEM_FORMAT_ENCODING")) && value.args().size() == 1;
    if (!known) fail(at, "found {}, wanted a memory format", value.describe());
    return count(value.args()[0], at);
  }

  DcpChunk chunk(const PickleValue& value, std::string_view at) const {
    const auto* state = state_of(value, kDcpClasses + std::string("ChunkStorageMetadata"), at);
    return {size(member(state, "offsets", at), at), size(member(state, "sizes", at), at)};
  }

  DcpPath path(const std::string& name, const PickleValue& value) const {
    if (value.kind() != PickleKind::kTuple && value.kind() != PickleKind::kList) {
      fail(name, "its path is {}, wanted a tuple", value.describe());
    }
    DcpPath path;
    for (const auto& part : value.items()) {
      if (part.kind() == PickleKind::kText) {
        path.emplace_back(part.as_text());
      } else if (part.kind() == PickleKind::kInt) {
        path.emplace_back(part.as_int());
      } else {
        fail(name, "{} in its path, wanted text or an integer", part.describe());
      }
    }
    return path;
  }

  DcpIndex index(const PickleValue& value) const {
    const auto* state = state_of(value, kDcpClasses + std::string("MetadataIndex"), "storage_data");
    DcpIndex found;
    found.name = text(member(state, "fqn", "storage_data"), "storage_data");
    const auto* offset = optional_member(state, "offset");
    if (offset && !offset->is_none()) found.offset = size(*offset, found.name);
    const auto* hint = optional_member(state, "index");
    if (hint && !hint->is_none()) found.index = count(*hint, found.name);
    return found;
  }

  DcpStorageInfo storage_info(const PickleValue& value, std::string_view at) const {
    const auto* state = state_of(value, "torch.distributed.checkpoint.filesystem._StorageInfo", at);
    DcpStorageInfo info;
    info.relative_path = text(member(state, "relative_path", at), at);
    info.offset = static_cast<uint64_t>(count(member(state, "offset", at), at));
    info.length = static_cast<uint64_t>(count(member(state, "length", at), at));
    info.transform_descriptors = texts(optional_member(state, "transform_descriptors"), at);
    return info;
  }

  DcpStorageMeta storage_meta(const PickleValue& value) const {
    const auto* state = state_of(value, kDcpClasses + std::string("StorageMeta"), "storage_meta");
    DcpStorageMeta meta;
    const auto* id = optional_member(state, "checkpoint_id");
    if (id && id->is_object("pathlib.PosixPath")) {
      meta.checkpoint_id = posix_path(*id);
      meta.checkpoint_id_is_path = true;
    } else {
      meta.checkpoint_id = optional_text(id, "checkpoint_id");
    }
    meta.save_id = optional_text(optional_member(state, "save_id"), "save_id");
    meta.load_id = optional_text(optional_member(state, "load_id"), "load_id");
    meta.modules = texts(optional_member(state, "modules"), "modules");
    return meta;
  }

  // PosixPath("/", "tmp", "ckpt") becomes "/tmp/ckpt".
  std::string posix_path(const PickleValue& value) const {
    std::string joined;
    for (size_t i = 0; i < value.args().size(); ++i) {
      const auto& part = text(value.args()[i], "checkpoint_id");
      const bool root = i == 0 && (part == "/" || part == "//");
      const bool plain = !part.empty() && part != "." && part.find('/') == part.npos;
      if (!root && !plain) fail("checkpoint_id", "{} is not a valid part of a path", quote(part));
      if (!joined.empty() && joined.back() != '/') joined += '/';
      joined += part;
    }
    return joined.empty() ? "." : joined;
  }

  const std::string& where_;
};

}  // namespace

DcpMetadata DcpMetadata::parse(std::string_view bytes, const std::string& where, const DcpParseOptions& options) {
  auto metadata = DcpParser(where).metadata(unpickle(std::as_bytes(std::span(bytes)), where));
  metadata.check(where, options);
  return metadata;
}

}  // namespace tessera
