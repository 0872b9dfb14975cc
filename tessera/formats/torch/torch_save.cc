#include "tessera/formats/torch/torch_save.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/files/mapped_file.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/torch/torch_dtypes.h"
#include "tessera/formats/torch/unpickler.h"
#include "tessera/formats/torch/zip_archive.h"

namespace tessera {
namespace {

constexpr size_t kMaxTensorDims = 64;

bool is_tensor_call(const PickleValue& value) {
  return value.is_object("torch._utils._rebuild_tensor_v2") || value.is_object("torch._utils._rebuild_tensor_v3");
}

// Reads one record, which torch.save() has written: first the zip archive, then the pickle in it, then the tensors in
// the pickle's tree of PickleValues. In the archive, FOLDER/data.pkl has the object. A tensor in it is a call of
// _rebuild_tensor_v2 (or v3), whose storage is the persistent id ('storage', class, key, device, elements). The bytes
// of that storage are the entry FOLDER/data/KEY.
class TorchRecordReader {
 public:
  TorchRecordReader(std::span<const std::byte> bytes, const std::string& where)
      : where_(where), archive_(ZipArchive::parse(bytes, where)) {
    if (archive_.entries().empty()) fail("the archive is empty");
    // All entries are in one folder, which torch names after the saved file; the first entry shows its name.
    const auto& first = archive_.entries()[0].name;
    folder_ = first.substr(0, first.find('/') + 1);
    if (folder_.empty()) fail("its first entry, {}, is not in a folder", quote(first));
    const auto order = text_entry("byteorder");
    if (order && *order != "little") fail("byte order {}, but only little-endian files are read", quote(*order));
  }

  PickleValue unpickled() const {
    const auto* entry = archive_.find(folder_ + "data.pkl");
    if (!entry) fail("the archive holds no {}: it is not from torch.save", quote(folder_ + "data.pkl"));
    archive_.check_crc(*entry, where_);
    return unpickle(archive_.data(*entry), where_);
  }

  // Adds all tensors at and below `value` to `found`. The key of a tensor is the identity of its pickle node
  // (PickleValue::identity()). Each node is visited once, so shared nodes cost no extra time. The depth of the
  // recursion is bounded, because the unpickler limits how deep values are nested.
  void find_tensors(const PickleValue& value, std::unordered_map<const void*, TorchTensorInfo>& found) {
    if (!value.identity() || !seen_.insert(value.identity()).second) return;
    switch (value.kind()) {
      case PickleKind::kObject:
        if (value.is_object("torch._utils._rebuild_parameter")) {
          found.emplace(value.identity(), rebuilt_parameter(value));
        } else if (is_tensor_call(value)) {
          found.emplace(value.identity(), rebuilt_tensor(value));
        } else {
          for (const auto& arg : value.args()) find_tensors(arg, found);
          find_tensors(value.state(), found);
        }
        return;
      case PickleKind::kDict:
        for (size_t i = 0; i < value.dict_size(); ++i) {
          find_tensors(value.key(i), found);
          find_tensors(value.value(i), found);
        }
        if (value.is_ordered_dict()) find_tensors(value.state(), found);
        return;
      case PickleKind::kList:
      case PickleKind::kTuple:
      case PickleKind::kSet:
        for (const auto& item : value.items()) find_tensors(item, found);
        return;
      default:
        return;
    }
  }

 private:
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    raise(ErrorKind::kFormat, "[torch_save] {}: {}", where_, fmt::format(format, std::forward<Args>(args)...));
  }
  std::optional<std::string_view> text_entry(const char* name) const {
    const auto* entry = archive_.find(folder_ + name);
    if (!entry) return std::nullopt;
    const auto data = archive_.data(*entry);
    return std::string_view(reinterpret_cast<const char*>(data.data()), data.size());
  }

  // Arguments of _rebuild_tensor_v2: storage, storage offset, size, stride, requires_grad, backward hooks and
  // optionally metadata. _rebuild_tensor_v3 has the dtype before the metadata, because its storage is untyped.
  TorchTensorInfo rebuilt_tensor(const PickleValue& value) const {
    const bool untyped = value.is_object("torch._utils._rebuild_tensor_v3");
    const auto args = value.args();
    const size_t wanted = untyped ? 7 : 6;
    if (args.size() != wanted && args.size() != wanted + 1) {
      fail("{} with {} arguments, wanted {}", value.describe(), args.size(), wanted);
    }
    TorchTensorInfo info;
    if (untyped) {
      const bool is_dtype = args[6].kind() == PickleKind::kGlobal && args[6].global_module() == "torch";
      const auto dtype = is_dtype ? find_torch_dtype(args[6].global_name()) : std::nullopt;
      if (!dtype) fail("a tensor whose dtype is {}", args[6].describe());
      info.dtype = *dtype;
    }
    resolve_storage(args[0], untyped, info);
    if (args[1].kind() != PickleKind::kInt || args[1].as_int() < 0) {
      fail("a tensor with storage offset {}", args[1].describe());
    }
    info.storage_offset = args[1].as_int();
    info.sizes = dims_of(args[2], "size");
    info.strides = dims_of(args[3], "stride");
    if (info.strides.size() != info.sizes.size()) {
      fail("a tensor of {} sizes and {} strides", info.sizes.size(), info.strides.size());
    }
    if (args[4].kind() != PickleKind::kBool) fail("a tensor whose requires_grad is {}", args[4].describe());
    info.requires_grad = args[4].as_bool();
    check_hooks_and_bits(args, wanted);
    check_extent(info);
    return info;
  }

  TorchTensorInfo rebuilt_parameter(const PickleValue& value) const {
    const auto args = value.args();
    const bool is_tensor = args.size() == 3 && is_tensor_call(args[0]);
    if (!is_tensor || args[1].kind() != PickleKind::kBool) fail("a parameter that is no tensor");
    if (args[2].kind() != PickleKind::kDict || args[2].dict_size() != 0) fail("a parameter with backward hooks");
    auto info = rebuilt_tensor(args[0]);
    info.requires_grad = args[1].as_bool();
    info.is_parameter = true;
    return info;
  }

  // Sets the storage fields of `info`. `untyped`: the tensor's storage is an UntypedStorage, whose elements are bytes.
  // Its dtype is then an argument of _rebuild_tensor_v3, and info.dtype is already set; otherwise info.dtype is set
  // from the storage class.
  void resolve_storage(const PickleValue& storage, bool untyped, TorchTensorInfo& info) const {
    if (storage.kind() != PickleKind::kPersistent) fail("a tensor whose storage is {}", storage.describe());
    const auto& id = storage.persistent_id();
    const bool is_id = id.kind() == PickleKind::kTuple && id.items().size() == 5 &&
                       id.items()[0].kind() == PickleKind::kText && id.items()[0].as_text() == "storage" &&
                       id.items()[1].kind() == PickleKind::kGlobal && id.items()[2].kind() == PickleKind::kText &&
                       id.items()[4].kind() == PickleKind::kInt && id.items()[4].as_int() >= 0;
    if (!is_id) fail("a storage whose id is {}, wanted ('storage', class, key, device, elements)", id.describe());
    const auto& cls = id.items()[1];
    if (untyped != cls.is_global("torch.storage.UntypedStorage")) fail("a tensor over a {}", cls.describe());
    if (!untyped) {
      const auto dtype = cls.global_module() == "torch" ? find_torch_storage(cls.global_name()) : std::nullopt;
      if (!dtype) fail("a tensor over a {}, which is not a storage class", cls.describe());
      info.dtype = *dtype;
    }
    const auto& key = id.items()[2].as_text();
    const auto* entry = archive_.find(folder_ + "data/" + key);
    if (!entry) fail("the archive holds no {}, which a tensor needs", quote(folder_ + "data/" + key));
    const auto elements = static_cast<uint64_t>(id.items()[4].as_int());
    const uint64_t item_bytes = untyped ? 1 : info.item_bytes();
    if (entry->size_bytes() % item_bytes != 0 || entry->size_bytes() / item_bytes != elements) {
      fail("{} holds {} bytes, wanted {} elements of {} bytes", quote(entry->name), entry->size_bytes(), elements,
           item_bytes);
    }
    info.storage_begin = entry->begin;
    info.storage_end = entry->end;
    info.storage_crc = entry->crc;
    info.storage_name = entry->name;
  }

  std::vector<int64_t> dims_of(const PickleValue& value, const char* field_name) const {
    const bool is_size = value.is_object("torch.Size") && value.args().size() == 1;
    const auto& tuple = is_size ? value.args()[0] : value;
    if (tuple.kind() != PickleKind::kTuple || tuple.items().size() > kMaxTensorDims) {
      fail("a tensor whose {} is {}", field_name, value.describe());
    }
    std::vector<int64_t> dims;
    for (const auto& item : tuple.items()) {
      if (item.kind() != PickleKind::kInt || item.as_int() < 0) {
        fail("a tensor with a {} of {}", field_name, item.describe());
      }
      dims.push_back(item.as_int());
    }
    return dims;
  }

  // Checks that the element with the highest position is inside the storage. Strides are not negative, so this element
  // is the last index of every dim. Every product and sum is checked for overflow.
  void check_extent(const TorchTensorInfo& info) const {
    const auto available = static_cast<int64_t>((info.storage_end - info.storage_begin) / info.item_bytes());
    int64_t last = info.storage_offset;  // position of the last element
    int64_t numel = 1;
    bool fits = info.storage_offset <= available;
    const bool is_empty = std::ranges::find(info.sizes, 0) != info.sizes.end();
    for (size_t dim = 0; fits && !is_empty && dim < info.sizes.size(); ++dim) {
      int64_t reach = 0;
      fits = !__builtin_mul_overflow(info.sizes[dim] - 1, info.strides[dim], &reach) &&
             !__builtin_add_overflow(last, reach, &last) && !__builtin_mul_overflow(numel, info.sizes[dim], &numel);
    }
    int64_t bytes = 0;
    fits = fits && (is_empty || last < available) &&
           !__builtin_mul_overflow(numel, static_cast<int64_t>(info.item_bytes()), &bytes);
    if (!fits) {
      fail("a tensor of shape [{}], strides [{}] from element {} on is not inside its storage of {} elements",
           fmt::join(info.sizes, ", "), fmt::join(info.strides, ", "), info.storage_offset, available);
    }
  }

  // Checks the arguments `args` of torch's _rebuild_tensor function. Rejects tensors with backward hooks (args[5]),
  // which torch never saves, and tensors whose conjugate or negative bit is set in the metadata dict
  // (args[metadata_at], the last argument, which may be absent).
  void check_hooks_and_bits(std::span<const PickleValue> args, size_t metadata_at) const {
    const auto& hooks = args[5];
    if (!hooks.is_none() && (hooks.kind() != PickleKind::kDict || hooks.dict_size() != 0)) {
      fail("a tensor with backward hooks, {}", hooks.describe());
    }
    if (args.size() <= metadata_at || args[metadata_at].is_none()) return;
    const auto& metadata = args[metadata_at];
    if (metadata.kind() != PickleKind::kDict) fail("a tensor whose metadata is {}", metadata.describe());
    for (size_t i = 0; i < metadata.dict_size(); ++i) {
      const auto& bit = metadata.value(i);
      if (bit.kind() == PickleKind::kBool && !bit.as_bool()) continue;
      fail(
          "a tensor with the bit {} set, whose values are not those of its bytes. Save tensor.resolve_conj() and "
          ".resolve_neg().",
          metadata.key(i).describe());
    }
  }

  const std::string& where_;
  ZipArchive archive_;
  std::string folder_;  // ends with a slash
  std::unordered_set<const void*> seen_;
};

}  // namespace

int64_t TorchTensorInfo::numel() const {
  if (std::ranges::find(sizes, 0) != sizes.end()) return 0;  // even if the other sizes overflow
  return c10::multiply_integers(sizes);
}

TorchRecord TorchRecord::parse(std::span<const std::byte> bytes, const std::string& where) {
  if (!bytes.empty() && bytes[0] == std::byte{0x80}) {
    raise(ErrorKind::kFormat,
          "[torch_save] {}: a pickle without an archive: a file of torch before 1.6, or not a file of torch.save. Load "
          "it "
          "with torch and save it again.",
          where);
  }
  TorchRecordReader reader(bytes, where);
  TorchRecord record;
  record.root_ = reader.unpickled();
  reader.find_tensors(record.root_, record.tensors_);
  return record;
}

const TorchTensorInfo* TorchRecord::find_tensor(const PickleValue& value) const {
  const auto found = tensors_.find(value.identity());
  return found == tensors_.end() ? nullptr : &found->second;
}

void check_storage_crc(std::span<const std::byte> record, const TorchTensorInfo& info, const std::string& where) {
  check_zip_crc(record.subspan(info.storage_begin, info.storage_end - info.storage_begin), info.storage_crc,
                info.storage_name, where);
}

at::Tensor record_tensor(std::span<const std::byte> record, const TorchTensorInfo& info,
                         std::shared_ptr<const void> keep) {
  if (info.numel() == 0) return at::empty(info.sizes, info.dtype);
  TESSERA_CHECK(info.storage_end <= record.size() && info.storage_begin <= info.storage_end, ErrorKind::kInternal,
                "[torch_save] a tensor at bytes {} to {} of a record of {}", info.storage_begin, info.storage_end,
                record.size());
  auto* data = const_cast<std::byte*>(record.data()) + info.begin();
  const bool aligned = reinterpret_cast<uintptr_t>(data) % info.item_bytes() == 0;
  if (aligned && info.dtype != c10::ScalarType::Bool) {
    return at::from_blob(
        data, info.sizes, info.strides, [keep](void*) {}, at::TensorOptions().dtype(info.dtype));
  }
  // Copies the bytes from the first to the last element once, even if the strides visit an element several times (an
  // expanded tensor).
  int64_t extent = 1;
  for (size_t dim = 0; dim < info.sizes.size(); ++dim) extent += (info.sizes[dim] - 1) * info.strides[dim];
  auto copy = at::empty({extent}, info.dtype);
  auto* out = static_cast<std::byte*>(copy.mutable_data_ptr());
  std::memcpy(out, data, copy.nbytes());
  if (info.dtype == c10::ScalarType::Bool) {  // any byte except 0 is true
    std::transform(out, out + extent, out, [](std::byte byte) { return std::byte{byte != std::byte{0}}; });
  }
  return copy.as_strided(info.sizes, info.strides);
}

std::shared_ptr<const TorchSaveFile> TorchSaveFile::open(const std::filesystem::path& path) {
  std::shared_ptr<TorchSaveFile> result(new TorchSaveFile);
  result->path_ = path;
  result->file_ = MappedFile::open(path);
  result->record_ = TorchRecord::parse(result->file_->bytes(), path.string());
  return result;
}

void TorchSaveFile::check_crc(const TorchTensorInfo& info) const {
  check_storage_crc(file_->bytes(), info, path_.string());
}

at::Tensor TorchSaveFile::tensor(const TorchTensorInfo& info) const {
  return record_tensor(file_->bytes(), info, file_);
}

}  // namespace tessera
