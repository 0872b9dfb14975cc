#include "tessera/formats/gguf/gguf.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "tessera/base/error.h"
#include "tessera/base/files/mapped_file.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/gguf/gguf_cursor.h"

namespace tessera {
namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr uint32_t kMaxDimensions = 4;
constexpr uint64_t kMaxNameBytes = 65535;
constexpr uint64_t kDefaultAlignment = 32;

uint32_t read_version(GgufCursor& cursor) {
  const auto magic = cursor.number<uint32_t>("the magic number");
  TESSERA_CHECK(magic == kMagic, ErrorKind::kFormat, "[gguf] {}: begins with {:#010x}, not with 'GGUF'",
                cursor.file_name(), magic);
  const auto version = cursor.number<uint32_t>("the version");
  // In a big-endian file the small version number is in the upper bytes, so the low 16 bits are 0.
  TESSERA_CHECK((version & 0xFFFF) != 0, ErrorKind::kFormat, "[gguf] {}: is big-endian, which is not supported",
                cursor.file_name());
  TESSERA_CHECK(version == 2 || version == 3, ErrorKind::kFormat,
                "[gguf] {}: version {}, wanted 2 or 3. Convert the file with a current llama.cpp.", cursor.file_name(),
                version);
  return version;
}

// Reads one tensor's header entry. begin and end stay relative to the start of the data section.
std::pair<std::string, GgufTensorInfo> read_tensor_info(GgufCursor& cursor, uint64_t alignment) {
  auto name = cursor.string(kMaxNameBytes, "a tensor name");
  const auto& file = cursor.file_name();
  const auto rank = cursor.number<uint32_t>("a tensor's rank");
  TESSERA_CHECK(rank <= kMaxDimensions, ErrorKind::kFormat,
                "[gguf] {}: tensor {} has {} dimensions, at most {} are allowed", file, quote(name), rank,
                kMaxDimensions);
  GgufTensorInfo info{};
  uint64_t elements = 1;
  for (uint32_t i = 0; i < rank; ++i) {
    const auto size = cursor.number<uint64_t>("a tensor's shape");
    const bool fits = size > 0 && !__builtin_mul_overflow(elements, size, &elements) && elements <= (uint64_t{1} << 56);
    TESSERA_CHECK(fits, ErrorKind::kFormat, "[gguf] {}: tensor {}: size {} of dimension {} is zero or too large", file,
                  quote(name), size, i);
    // The file stores the size of the fastest dimension first; info.shape has the slowest dimension first.
    info.shape.insert(info.shape.begin(), static_cast<int64_t>(size));
  }
  const auto type = cursor.number<uint32_t>("a tensor's type");
  const auto* known = ggml_type_info(type);
  TESSERA_CHECK(known, ErrorKind::kFormat, "[gguf] {}: tensor {} has the unknown type {}", file, quote(name), type);
  info.type = known->type;
  const uint64_t row = info.shape.empty() ? 1 : static_cast<uint64_t>(info.shape.back());
  TESSERA_CHECK(row % known->block_elements == 0, ErrorKind::kFormat,
                "[gguf] {}: tensor {}: rows of {} are no multiple of the {} elements of a {} block", file, quote(name),
                row, known->block_elements, known->name);
  info.begin = cursor.number<uint64_t>("a tensor's offset");
  TESSERA_CHECK(info.begin % alignment == 0, ErrorKind::kFormat, "[gguf] {}: tensor {}: offset {} is no multiple of {}",
                file, quote(name), info.begin, alignment);
  const uint64_t bytes = elements / known->block_elements * known->block_bytes;
  TESSERA_CHECK(!__builtin_add_overflow(info.begin, bytes, &info.end), ErrorKind::kFormat,
                "[gguf] {}: tensor {}: offset {} is too large", file, quote(name), info.begin);
  return {std::move(name), std::move(info)};
}

// Checks that the tensors are inside the file and do not overlap, then makes their offsets absolute. The tensors are
// visited by rising offset, so comparing each with the end of the one before finds every overlap.
void place_tensors(std::map<std::string, GgufTensorInfo, std::less<>>& tensors, uint64_t data_begin,
                   uint64_t file_bytes, const std::string& file) {
  std::vector<std::pair<const std::string, GgufTensorInfo>*> order;
  for (auto& tensor : tensors) order.push_back(&tensor);
  std::ranges::sort(order, [](const auto* a, const auto* b) { return a->second.begin < b->second.begin; });
  const uint64_t data_bytes = file_bytes > data_begin ? file_bytes - data_begin : 0;
  uint64_t covered = 0;
  for (auto* item : order) {
    auto& [name, info] = *item;
    TESSERA_CHECK(
        info.end <= data_bytes, ErrorKind::kFormat,
        "[gguf] {}: tensor {} ends at data byte {}, but the file holds {}. The file is cut off; fetch it again.", file,
        quote(name), info.end, data_bytes);
    TESSERA_CHECK(info.begin >= covered, ErrorKind::kFormat,
                  "[gguf] {}: tensor {} begins at data byte {}, inside the tensor before it, which ends at {}", file,
                  quote(name), info.begin, covered);
    covered = info.end;
    info.begin += data_begin;
    info.end += data_begin;
  }
}

template <class T>
constexpr bool kIsInteger = std::is_integral_v<T> && !std::is_same_v<T, bool>;

[[noreturn]] void wrong_type(const std::filesystem::path& path, std::string_view key, const char* expected_type) {
  raise(ErrorKind::kFormat, "[gguf] {}: key {} does not hold {}", path.string(), quote(key), expected_type);
}

}  // namespace

std::optional<c10::ScalarType> plain_dtype(GgmlType type) {
  switch (type) {
    case GgmlType::kF32:
      return at::kFloat;
    case GgmlType::kF16:
      return at::kHalf;
    case GgmlType::kBF16:
      return at::kBFloat16;
    default:
      return std::nullopt;
  }
}

// Layout: magic, version, the two counts, metadata, tensor entries, padding to the alignment, tensor data. The data
// begins after the entries, so tensors are placed after all entries are read.
std::shared_ptr<const GgufFile> GgufFile::open(const std::filesystem::path& path) {
  std::shared_ptr<GgufFile> result(new GgufFile);
  result->file_ = MappedFile::open(path);
  const auto bytes = result->file_->bytes();
  GgufCursor cursor(bytes, path.string());
  result->version_ = read_version(cursor);
  const auto tensor_count = cursor.count(8 + 4 + 4 + 8, "tensors");
  const auto key_count = cursor.count(8 + 4 + 1, "metadata keys");
  for (uint64_t i = 0; i < key_count; ++i) {
    auto key = cursor.string(kMaxNameBytes, "a metadata key");
    const auto type = cursor.number<uint32_t>("a metadata type");
    auto value = cursor.value(type, key);
    TESSERA_CHECK(!result->metadata_.contains(key), ErrorKind::kFormat, "[gguf] {}: key {} occurs twice", path.string(),
                  quote(key));
    result->metadata_.emplace(std::move(key), std::move(value));
  }
  const uint64_t alignment = result->find_uint("general.alignment").value_or(kDefaultAlignment);
  TESSERA_CHECK(alignment > 0 && (alignment & (alignment - 1)) == 0 && alignment <= (uint64_t{1} << 31),
                ErrorKind::kFormat, "[gguf] {}: general.alignment is {}, wanted a power of two", path.string(),
                alignment);
  for (uint64_t i = 0; i < tensor_count; ++i) {
    auto [name, info] = read_tensor_info(cursor, alignment);
    TESSERA_CHECK(!result->tensors_.contains(name), ErrorKind::kFormat, "[gguf] {}: tensor {} occurs twice",
                  path.string(), quote(name));
    result->tensors_.emplace(std::move(name), std::move(info));
  }
  const uint64_t data_begin = (cursor.position() + alignment - 1) / alignment * alignment;
  place_tensors(result->tensors_, data_begin, bytes.size(), path.string());
  return result;
}

const std::filesystem::path& GgufFile::path() const { return file_->path(); }

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto found = metadata_.find(key);
  return found == metadata_.end() ? nullptr : &found->second;
}

// Writers store the same key with different integer types, so each type is accepted if the value fits.
std::optional<uint64_t> GgufFile::find_uint(std::string_view key) const {
  const auto* value = find(key);
  if (!value) return std::nullopt;
  return std::visit(
      [&](const auto& held) -> uint64_t {
        using T = std::decay_t<decltype(held)>;
        if constexpr (kIsInteger<T>) {
          if (std::cmp_greater_equal(held, 0)) return static_cast<uint64_t>(held);
        }
        wrong_type(path(), key, "a non-negative integer");
      },
      *value);
}

uint64_t GgufFile::require_uint(std::string_view key) const {
  const auto value = find_uint(key);
  TESSERA_CHECK(value, ErrorKind::kFormat, "[gguf] {}: has no key {}", path().string(), quote(key));
  return *value;
}

std::optional<double> GgufFile::find_float(std::string_view key) const {
  const auto* value = find(key);
  if (!value) return std::nullopt;
  return std::visit(
      [&](const auto& held) -> double {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_floating_point_v<T>) {
          if (std::isfinite(held)) return held;
        } else if constexpr (kIsInteger<T>) {
          return static_cast<double>(held);
        }
        wrong_type(path(), key, "a finite number");
      },
      *value);
}

// The find functions below do not convert the value: its type must be exactly T. Only find_ints() accepts all integer
// types.
template <class T>
const T* GgufFile::find_value_of_type(std::string_view key, const char* expected_type) const {
  const auto* value = find(key);
  if (!value) return nullptr;
  const T* held = std::get_if<T>(value);
  if (!held) wrong_type(path(), key, expected_type);
  return held;
}

template <class T>
const std::vector<T>* GgufFile::find_items(std::string_view key, const char* expected_type) const {
  const auto* array = find_value_of_type<GgufArray>(key, expected_type);
  if (!array) return nullptr;
  const auto* items = std::get_if<std::vector<T>>(&array->items);
  if (!items) wrong_type(path(), key, expected_type);
  return items;
}

std::optional<bool> GgufFile::find_bool(std::string_view key) const {
  const auto* held = find_value_of_type<bool>(key, "a truth value");
  return held ? std::optional(*held) : std::nullopt;
}

std::optional<std::string> GgufFile::find_string(std::string_view key) const {
  const auto* held = find_value_of_type<std::string>(key, "a string");
  return held ? std::optional(*held) : std::nullopt;
}

const std::vector<std::string>* GgufFile::find_strings(std::string_view key) const {
  return find_items<std::string>(key, "an array of strings");
}

const std::vector<float>* GgufFile::find_floats(std::string_view key) const {
  return find_items<float>(key, "an array of float32");
}

std::optional<std::vector<int64_t>> GgufFile::find_ints(std::string_view key) const {
  const auto* array = find_value_of_type<GgufArray>(key, "an array of integers");
  if (!array) return std::nullopt;
  return std::visit(
      [&](const auto& items) -> std::vector<int64_t> {
        using T = typename std::decay_t<decltype(items)>::value_type;
        if constexpr (kIsInteger<T>) {
          std::vector<int64_t> result;
          for (const T item : items) {
            if (!std::in_range<int64_t>(item)) wrong_type(path(), key, "integers below 2^63");
            result.push_back(static_cast<int64_t>(item));
          }
          return result;
        } else {
          wrong_type(path(), key, "an array of integers");
        }
      },
      array->items);
}

const GgufTensorInfo& GgufFile::tensor_info(std::string_view name) const {
  const auto found = tensors_.find(name);
  TESSERA_CHECK(found != tensors_.end(), ErrorKind::kFormat,
                "[gguf] {}: holds no tensor {}. List the file with 'tessera ckpt ls PATH'.", path().string(),
                quote(name));
  return found->second;
}

at::Tensor GgufFile::tensor(std::string_view name) const {
  const auto& info = tensor_info(name);
  const auto* type = ggml_type_info(static_cast<uint32_t>(info.type));
  TESSERA_CHECK(type->decodes, ErrorKind::kFormat,
                "[gguf] {}: tensor {} is {}, which cannot be decoded (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, "
                "Q4_K, Q5_K and Q6_K can). Requantise the file with llama.cpp.",
                path().string(), quote(name), type->name);
  const auto bytes = file_->bytes().subspan(info.begin, info.end - info.begin);
  // An F32, F16 or BF16 tensor is returned as a view of the mapped file if its address is a multiple of 4, the size in
  // bytes of the largest of these dtypes. Otherwise it is decoded into new memory, as float32.
  const bool aligned = reinterpret_cast<uintptr_t>(bytes.data()) % 4 == 0;
  if (const auto dtype = plain_dtype(info.type); dtype && aligned) {
    return at::from_blob(
        const_cast<std::byte*>(bytes.data()), info.shape, [keep = file_](void*) {}, at::TensorOptions().dtype(*dtype));
  }
  auto values = at::empty(info.shape, at::kFloat);
  float* out = values.data_ptr<float>();
  const int64_t blocks = values.numel() / type->block_elements;
  at::parallel_for(0, blocks, 4096, [&](int64_t begin, int64_t end) {
    const auto first = static_cast<size_t>(begin), count = static_cast<size_t>(end - begin);
    dequantize(info.type, bytes.subspan(first * type->block_bytes, count * type->block_bytes),
               {out + first * type->block_elements, count * type->block_elements});
  });
  return values;
}

at::Tensor GgufFile::packed_rows(std::string_view name) const {
  const auto& info = tensor_info(name);
  const auto* type = ggml_type_info(static_cast<uint32_t>(info.type));
  const int64_t width = info.shape.empty() ? 1 : info.shape.back(), block = type->block_elements;
  TESSERA_CHECK(width > 0 && width % block == 0, ErrorKind::kFormat,
                "[gguf] {}: tensor {} has rows of {} elements, wanted whole blocks of {}", path().string(), quote(name),
                width, block);
  const int64_t row_bytes = width / block * type->block_bytes;
  auto* const bytes = const_cast<std::byte*>(file_->bytes().subspan(info.begin).data());
  return at::from_blob(
      bytes, {static_cast<int64_t>(info.end - info.begin) / row_bytes, row_bytes}, [keep = file_](void*) {},
      at::TensorOptions().dtype(at::kByte));
}

}  // namespace tessera
