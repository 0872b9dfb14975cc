#include "tessera/formats/safetensors/safetensors_header.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera {
namespace {

constexpr size_t kMaxRank = 64;

// Receives the events of the JSON parser and accepts only the format's own structure, so a hostile header cannot
// allocate anything else. `level_` is the nesting: 0 outside, 1 the header object, 2 one tensor (or __metadata__), 3
// one of its arrays.
class HeaderHandler {
 public:
  using json = nlohmann::json;
  HeaderHandler(SafetensorsHeader& header, const std::string& file_name) : header_(header), file_name_(file_name) {}

  bool start_object(size_t) {
    if (level_ == 2) fail("an object where a value is due");
    if (level_ == 3) fail("an object inside an array");
    ++level_;
    return true;
  }
  // A key at level 1 begins a new tensor. All fields are reset, so that a tensor cannot get fields of the tensor before
  // it.
  bool key(std::string& text) {
    if (level_ == 1) {
      in_metadata_ = text == "__metadata__";
      if (in_metadata_ ? seen_metadata_ : header_.entries.contains(text)) fail("the name twice", text);
      seen_metadata_ = seen_metadata_ || in_metadata_;
      name_ = text;
      entry_ = {};
      dtype_.reset();
      has_shape_ = has_offsets_ = false;
      offsets_.clear();
    } else if (in_metadata_) {
      if (header_.metadata.contains(text)) fail("the metadata key twice", text);
    } else if (text != "dtype" && text != "shape" && text != "data_offsets") {
      fail("unknown key " + quote(text));
    }
    key_ = text;
    return true;
  }
  bool end_object() {
    if (level_ == 2 && !in_metadata_) finish_entry();
    --level_;
    return true;
  }
  bool start_array(size_t) {
    const bool wanted = level_ == 2 && !in_metadata_ && (key_ == "shape" || key_ == "data_offsets");
    if (!wanted) fail("an array where none is due");
    bool& seen = key_ == "shape" ? has_shape_ : has_offsets_;
    if (seen) fail("key " + quote(key_) + " twice");
    seen = true;
    ++level_;
    return true;
  }
  bool end_array() {
    --level_;
    return true;
  }
  bool string(std::string& text) {
    if (level_ == 2 && in_metadata_) {
      header_.metadata.emplace(key_, text);
      return true;
    }
    if (level_ != 2 || key_ != "dtype") fail("a string where none is due");
    if (dtype_) fail("key 'dtype' twice");
    dtype_ = find_safetensors_dtype(text);
    TESSERA_CHECK(
        dtype_, ErrorKind::kFormat,
        "[safetensors] {}: tensor {}: dtype {} is not supported: wanted F64, F32, F16, BF16, F8_E4M3, F8_E5M2, "
        "I64, I32, I16, I8, U64, U32, U16, U8 or BOOL",
        file_name_, quote(name_), quote(text));
    return true;
  }
  bool number_unsigned(uint64_t value) {
    if (level_ != 3) fail("a number where none is due");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) fail("a number beyond 2^63");
    if (key_ == "shape") {
      if (entry_.shape.size() == kMaxRank) fail("more than 64 dimensions");
      entry_.shape.push_back(static_cast<int64_t>(value));
    } else {
      if (offsets_.size() == 2) fail("more than two data_offsets");
      offsets_.push_back(value);
    }
    return true;
  }
  bool null() { return fail("null"); }
  bool boolean(bool) { return fail("a truth value"); }
  bool number_integer(int64_t) { return fail("a negative number"); }
  bool number_float(double, const std::string&) { return fail("a fraction"); }
  bool binary(json::binary_t&) { return fail("binary"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
    raise(ErrorKind::kFormat, "[safetensors] {}: the header is not JSON at byte {}: {}", file_name_, 8 + position,
          escape(error.what(), 200));
  }

 private:
  bool fail(const std::string& problem) { return fail(problem, name_); }
  [[noreturn]] bool fail(const std::string& problem, const std::string& name) {
    raise(ErrorKind::kFormat, "[safetensors] {}: tensor {}: the header has {}, which the format does not allow there",
          file_name_, quote(name), problem);
  }
  void finish_entry() {
    if (!dtype_ || !has_shape_ || offsets_.size() != 2) fail("no complete dtype, shape and data_offsets");
    entry_.dtype = *dtype_;
    entry_.begin = offsets_[0];
    entry_.end = offsets_[1];
    uint64_t bytes = c10::elementSize(*dtype_);
    bool empty = false;
    for (const int64_t size : entry_.shape) {
      empty = empty || size == 0;
      // Sizes of 0 count as 1 here. So the other sizes of an empty tensor are checked for overflow too, because
      // libtorch computes strides from them.
      const auto factor = static_cast<uint64_t>(std::max<int64_t>(size, 1));
      if (__builtin_mul_overflow(bytes, factor, &bytes) || bytes >> 63) fail("a shape beyond 2^63 bytes");
    }
    if (empty) bytes = 0;
    TESSERA_CHECK(entry_.begin <= entry_.end && entry_.end - entry_.begin == bytes, ErrorKind::kFormat,
                  "[safetensors] {}: tensor {}: data_offsets [{}, {}], but {} x shape [{}] is {} bytes", file_name_,
                  quote(name_), entry_.begin, entry_.end, safetensors_dtype_name(entry_.dtype),
                  fmt::join(entry_.shape, ", "), bytes);
    header_.entries.emplace(name_, std::move(entry_));
  }

  SafetensorsHeader& header_;
  const std::string& file_name_;
  int level_ = 0;
  bool in_metadata_ = false;
  bool seen_metadata_ = false;
  std::string name_;
  std::string key_;
  SafetensorsEntry entry_{};
  std::optional<c10::ScalarType> dtype_;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  std::vector<uint64_t> offsets_;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& file_name) {
  SafetensorsHeader header;
  // The format pads the header with spaces. The parser accepts white space after the object, but no other bytes.
  TESSERA_CHECK(!json.empty() && json.front() == '{', ErrorKind::kFormat,
                "[safetensors] {}: the header does not begin with '{{'. Is this a safetensors file?", file_name);
  HeaderHandler events(header, file_name);
  nlohmann::json::sax_parse(json.begin(), json.end(), &events);
  return header;
}

}  // namespace tessera
