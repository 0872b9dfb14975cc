// Parquet as rows, through libparquet and libarrow. no_parquet_rows.cc is its twin in a build without them.
#include <arrow/api.h>
#include <arrow/io/api.h>
#include <parquet/arrow/reader.h>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/text/utf8.h"
#include "tessera/data/records/row_source.h"

namespace tessera::data {
namespace {

constexpr int64_t kRowsAtOnce = 256;

// What a value is of, for messages; the text is made when it is wanted.
struct CellPlace {
  const std::filesystem::path& path;
  int64_t row;
  const std::string& column;
  std::string text() const { return fmt::format("{} row {} column {}", path.string(), row, quote(column)); }
};

Json json_of(const arrow::Array& array, int64_t index, const CellPlace& place, int depth);

template <class Array>
Json json_of_text(const arrow::Array& array, int64_t index, const CellPlace& place) {
  const std::string_view text = static_cast<const Array&>(array).GetView(index);
  TESSERA_CHECK(is_valid_utf8(text), ErrorKind::kFormat, "[data.read] {}: the text is no UTF-8: {}", place.text(),
                quote(text));
  return std::string(text);
}

template <class Array>
Json json_of_bytes(const arrow::Array& array, int64_t index) {
  const std::string_view bytes = static_cast<const Array&>(array).GetView(index);
  return Json::binary({bytes.begin(), bytes.end()});
}

Json json_of_range(const arrow::Array& values, int64_t first, int64_t count, const CellPlace& place, int depth) {
  Json list = Json::array();
  for (int64_t i = 0; i < count; ++i) list.push_back(json_of(values, first + i, place, depth));
  return list;
}

template <class Array>
Json json_of_list(const arrow::Array& array, int64_t index, const CellPlace& place, int depth) {
  const auto& list = static_cast<const Array&>(array);
  return json_of_range(*list.values(), list.value_offset(index), list.value_length(index), place, depth);
}

Json json_of_struct(const arrow::Array& array, int64_t index, const CellPlace& place, int depth) {
  const auto& fields = static_cast<const arrow::StructArray&>(array);
  Json object = Json::object();
  for (int i = 0; i < fields.num_fields(); ++i) {
    object[fields.struct_type()->field(i)->name()] = json_of(*fields.field(i), index, place, depth);
  }
  return object;
}

// An object where keys are text, else pairs.
Json json_of_map(const arrow::Array& array, int64_t index, const CellPlace& place, int depth) {
  const auto& map = static_cast<const arrow::MapArray&>(array);
  const bool text = map.keys()->type_id() == arrow::Type::STRING || map.keys()->type_id() == arrow::Type::LARGE_STRING;
  Json all = text ? Json::object() : Json::array();
  for (int64_t at = map.value_offset(index); at < map.value_offset(index) + map.value_length(index); ++at) {
    Json key = json_of(*map.keys(), at, place, depth), item = json_of(*map.items(), at, place, depth);
    if (text) {
      all[key.get<std::string>()] = std::move(item);
    } else {
      all.push_back(Json::array({std::move(key), std::move(item)}));
    }
  }
  return all;
}

template <class Array>
Json json_of_number(const arrow::Array& array, int64_t index) {
  return static_cast<const Array&>(array).Value(index);
}

Json json_of(const arrow::Array& array, int64_t index, const CellPlace& place, int depth) {
  TESSERA_CHECK(depth < 64, ErrorKind::kFormat, "[data.read] {}: nested deeper than 64 levels.", place.text());
  if (array.IsNull(index)) return nullptr;
  using arrow::Type;
  switch (array.type_id()) {
    case Type::NA:
      return nullptr;
    case Type::BOOL:
      return static_cast<const arrow::BooleanArray&>(array).Value(index);
    case Type::INT8:
      return json_of_number<arrow::Int8Array>(array, index);
    case Type::INT16:
      return json_of_number<arrow::Int16Array>(array, index);
    case Type::INT32:
      return json_of_number<arrow::Int32Array>(array, index);
    case Type::INT64:
      return json_of_number<arrow::Int64Array>(array, index);
    case Type::UINT8:
      return json_of_number<arrow::UInt8Array>(array, index);
    case Type::UINT16:
      return json_of_number<arrow::UInt16Array>(array, index);
    case Type::UINT32:
      return json_of_number<arrow::UInt32Array>(array, index);
    case Type::UINT64:
      return json_of_number<arrow::UInt64Array>(array, index);
    case Type::FLOAT:
      return json_of_number<arrow::FloatArray>(array, index);
    case Type::DOUBLE:
      return json_of_number<arrow::DoubleArray>(array, index);
    case Type::STRING:
      return json_of_text<arrow::StringArray>(array, index, place);
    case Type::LARGE_STRING:
      return json_of_text<arrow::LargeStringArray>(array, index, place);
    case Type::STRING_VIEW:
      return json_of_text<arrow::StringViewArray>(array, index, place);
    case Type::BINARY:
      return json_of_bytes<arrow::BinaryArray>(array, index);
    case Type::LARGE_BINARY:
      return json_of_bytes<arrow::LargeBinaryArray>(array, index);
    case Type::FIXED_SIZE_BINARY:
      return json_of_bytes<arrow::FixedSizeBinaryArray>(array, index);
    case Type::LIST:
      return json_of_list<arrow::ListArray>(array, index, place, depth + 1);
    case Type::LARGE_LIST:
      return json_of_list<arrow::LargeListArray>(array, index, place, depth + 1);
    case Type::FIXED_SIZE_LIST:
      return json_of_list<arrow::FixedSizeListArray>(array, index, place, depth + 1);
    case Type::STRUCT:
      return json_of_struct(array, index, place, depth + 1);
    case Type::MAP:
      return json_of_map(array, index, place, depth + 1);
    case Type::DICTIONARY: {
      const auto& coded = static_cast<const arrow::DictionaryArray&>(array);
      return json_of(*coded.dictionary(), coded.GetValueIndex(index), place, depth + 1);
    }
    case Type::EXTENSION:
      return json_of(*static_cast<const arrow::ExtensionArray&>(array).storage(), index, place, depth + 1);
    default: {  // dates, times, decimals: as Arrow prints them
      const auto scalar = array.GetScalar(index);
      TESSERA_CHECK(scalar.ok(), ErrorKind::kFormat, "[data.read] {}: {}", place.text(),
                    escape(scalar.status().message(), 200));
      return (*scalar)->ToString();
    }
  }
}

class ParquetRows : public RowSource {
 public:
  explicit ParquetRows(const std::filesystem::path& path) : path_(path) {
    guarded("", [&] {
      auto file = arrow::io::ReadableFile::Open(path.string());
      TESSERA_CHECK(file.ok(), ErrorKind::kIo, "[data.read] {}: cannot be opened for reading: {}", path.string(),
                    escape(file.status().message(), 200));
      auto properties = parquet::default_reader_properties();
      properties.enable_buffered_stream();  // pages as they are wanted, no whole
                                            // column
      parquet::ArrowReaderProperties arrow_properties(/*use_threads=*/false);
      arrow_properties.set_pre_buffer(false);
      arrow_properties.set_batch_size(kRowsAtOnce);
      parquet::arrow::FileReaderBuilder builder;
      check(builder.Open(*file, properties));
      check(builder.properties(arrow_properties)->Build(&reader_));
      auto batches = reader_->GetRecordBatchReader();
      check(batches.status());
      batches_ = std::move(*batches);
    });
  }

  bool next(Row& row) override {
    while (!batch_ || at_ == batch_->num_rows()) {
      batch_.reset();
      at_ = 0;
      guarded(fmt::format(" behind row {}", number_), [&] {
        check(batches_->ReadNext(&batch_));
        if (batch_) check(batch_->ValidateFull());
      });
      if (!batch_) return false;
    }
    ++number_;
    row.where = fmt::format("{} row {}", path_.string(), number_);
    row.nulls_are_absent = true;
    row.value = Json::object();
    for (int i = 0; i < batch_->num_columns(); ++i) {
      const auto& name = batch_->column_name(i);
      row.value[name] = json_of(*batch_->column(i), at_, {path_, number_, name}, 0);
    }
    ++at_;
    return true;
  }

 private:
  static void check(const arrow::Status& status) {
    if (!status.ok()) throw std::runtime_error(status.message());
  }
  // libparquet throws, too.
  template <class Action>
  void guarded(const std::string& place, Action action) {
    try {
      action();
    } catch (const Error&) {
      throw;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      raise(ErrorKind::kFormat, "[data.read] {}{}: no whole Parquet file: {} Fetch or write it again.", path_.string(),
            place, escape(error.what(), 300));
    }
  }

  std::filesystem::path path_;
  std::unique_ptr<parquet::arrow::FileReader> reader_;
  std::shared_ptr<arrow::RecordBatchReader> batches_;
  std::shared_ptr<arrow::RecordBatch> batch_;
  int64_t at_ = 0;      // next row of the batch
  int64_t number_ = 0;  // of the last row, from 1
};

}  // namespace

bool reads_parquet() { return true; }

std::unique_ptr<RowSource> open_parquet(const std::filesystem::path& path) {
  return std::make_unique<ParquetRows>(path);
}

}  // namespace tessera::data
