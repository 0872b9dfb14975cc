#include "tessera/formats/torch/torch_save_writer.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>
#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/base/files/staged.h"
#include "tessera/formats/torch/pickler.h"
#include "tessera/formats/torch/torch_dtypes.h"

namespace tessera {
namespace {

constexpr const char* kTorchFolder = "archive/";  // folder name of torch.save when it writes to a stream

struct FixedEntry {
  const char* name;
  std::string_view content;
};
constexpr FixedEntry kBeforeData[] = {{".format_version", "1"}, {".storage_alignment", "64"}, {"byteorder", "little"}};
constexpr FixedEntry kVersionEntry{"version", "3\n"};
constexpr const char* kIdEntry = ".data/serialization_id";
constexpr uint64_t kIdBytes = 40;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

int64_t product_of(std::span<const int64_t> sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) {
    TESSERA_CHECK(size >= 0, ErrorKind::kShape, "[torch_save] a size of {}", size);
    TESSERA_CHECK(!__builtin_mul_overflow(count, size, &count), ErrorKind::kShape,
                  "[torch_save] a tensor of shape [{}] has too many elements", fmt::join(sizes, ", "));
  }
  return count;
}

// The arguments of the call by which torch pickles a dense row-major tensor.
PickleValue tensor_pickle(c10::ScalarType dtype, std::span<const int64_t> sizes, const std::string& key,
                          bool requires_grad) {
  const auto storage_name = torch_storage_name(dtype);
  const bool untyped = storage_name.empty();
  const int64_t numel = product_of(sizes);
  const auto dense = c10::contiguous_strides(c10::IntArrayRef(sizes.data(), sizes.size()));
  std::vector<PickleValue> shape(sizes.begin(), sizes.end()), strides(dense.begin(), dense.end());
  const auto cls = untyped ? PickleValue::global("torch.storage", "UntypedStorage")
                           : PickleValue::global("torch", std::string(storage_name));
  const auto units = untyped ? numel * static_cast<int64_t>(c10::elementSize(dtype)) : numel;
  const auto storage = PickleValue::persistent(PickleValue::tuple({"storage", cls, key, "cpu", units}));
  std::vector<PickleValue> args{storage,
                                0,
                                PickleValue::tuple(std::move(shape)),
                                PickleValue::tuple(std::move(strides)),
                                requires_grad,
                                PickleValue::ordered_dict({})};
  if (untyped) args.push_back(PickleValue::global("torch", std::string(torch_dtype_name(dtype))));
  return PickleValue::call(PickleValue::global("torch._utils", untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2"),
                           std::move(args));
}

std::string entry_name(std::string_view name) { return kTorchFolder + std::string(name); }
std::string data_name(size_t index) { return entry_name("data/" + std::to_string(index)); }

// Returns the length of the archive that TorchSaveWriter::write() writes, with the same entries in the same order. The
// length depends only on names and sizes, so the tensor values are not needed.
uint64_t archive_bytes(const PickleValue& root, std::span<const uint64_t> storage_bytes) {
  std::vector<ZipEntrySize> entries{{entry_name("data.pkl"), pickle(root, {.protocol = 2}).size()}};
  for (const auto& [name, content] : kBeforeData) entries.push_back({entry_name(name), content.size()});
  for (size_t i = 0; i < storage_bytes.size(); ++i) entries.push_back({data_name(i), storage_bytes[i]});
  entries.push_back({entry_name(kVersionEntry.name), kVersionEntry.content.size()});
  entries.push_back({entry_name(kIdEntry), kIdBytes});
  return zip_archive_bytes(entries);
}

}  // namespace

PickleValue TorchSaveWriter::add(const at::Tensor& tensor, const TensorRecordOptions& options) {
  TESSERA_CHECK(tensor.defined(), ErrorKind::kFormat, "[torch_save] an undefined tensor cannot be saved");
  const bool has_bytes = tensor.layout() == at::kStrided && !tensor.is_meta() && tensor.has_storage();
  TESSERA_CHECK(has_bytes, ErrorKind::kFormat,
                "[torch_save] a tensor {} of shape [{}] has no bytes to save: it is sparse, on device meta, or "
                "distributed. Save a plain, dense tensor, or a DTensor's local tensor.",
                tensor.toString(), fmt::join(tensor.sizes(), ", "));
  const auto dtype = tensor.scalar_type();
  torch_dtype_name(dtype);  // throws for a dtype that cannot be saved
  // Contiguous tensors that each cover the same whole storage are written as one storage of the file. Any other view is
  // written as a compact storage of its own. A tensor of another dtype on the same storage gets its own storage too,
  // because a storage in the file has one dtype.
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  const bool whole = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
                     tensor.storage().nbytes() == tensor.nbytes() && tensor.numel() > 0;
  size_t index = storages_.size();
  if (whole) {
    const auto [found, added] = index_by_storage_.emplace(storage, index);
    if (!added && storages_[found->second].scalar_type() == dtype) index = found->second;
  }
  if (index == storages_.size()) storages_.push_back(tensor.detach());
  return tensor_pickle(dtype, {tensor.sizes().data(), tensor.sizes().size()}, std::to_string(index),
                       options.requires_grad);
}

uint64_t TorchSaveWriter::write(const PickleValue& root, const ByteSink& sink) {
  ZipWriter zip(sink);
  zip.add(entry_name("data.pkl"), bytes_of(pickle(root, {.protocol = 2})));
  for (const auto& [name, content] : kBeforeData) zip.add(entry_name(name), bytes_of(content));
  for (size_t i = 0; i < storages_.size(); ++i) {
    const at::Tensor tensor(storages_[i]);
    zip.add(data_name(i), tensor.nbytes(), [&](const ByteSink& data) {
      const auto plain = tensor.resolve_conj().resolve_neg().cpu().contiguous();
      data({static_cast<const std::byte*>(plain.const_data_ptr()), plain.nbytes()});
    });
  }
  zip.add(entry_name(kVersionEntry.name), bytes_of(kVersionEntry.content));
  zip.add(entry_name(kIdEntry), bytes_of(zip.content_id()));
  return zip.finish();
}

uint64_t write_tensor_record(const at::Tensor& tensor, const ByteSink& sink, const TensorRecordOptions& options) {
  TorchSaveWriter writer;
  return writer.write(writer.add(tensor, options), sink);
}

uint64_t write_object_record(const PickleValue& object, const ByteSink& sink) {
  return TorchSaveWriter().write(object, sink);
}

uint64_t tensor_record_bytes(c10::ScalarType dtype, std::span<const int64_t> sizes,
                             const TensorRecordOptions& options) {
  const uint64_t bytes = static_cast<uint64_t>(product_of(sizes)) * c10::elementSize(dtype);
  return archive_bytes(tensor_pickle(dtype, sizes, "0", options.requires_grad), {&bytes, 1});
}

uint64_t object_record_bytes(const PickleValue& object) { return archive_bytes(object, {}); }

void write_torch_save(const std::filesystem::path& path, TorchSaveWriter& writer, const PickleValue& root) {
  StagedFile file(path);
  uint64_t end = 0;
  writer.write(root, [&](std::span<const std::byte> bytes) {
    file.write_at(end, bytes);
    end += bytes.size();
  });
  file.publish();
}

}  // namespace tessera
