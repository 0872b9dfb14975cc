// Reads Parquet as rows, through libparquet and libarrow. A build without them uses no_parquet_rows.cc.
#include <arrow/api.h>
#include <arrow/io/api.h>
#include <parquet/arrow/reader.h>

#include <type_traits>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/text/utf8.h"
#include "tessera/data/records/row_source.h"

namespace tessera::data {
namespace {

constexpr int64_t kRowsAtOnce = 256;

// The place of a value, for messages. The text is created only for an error.
struct CellPlace {
  const std::filesystem::path& path;
  int64_t row;
  const std::string& column;
  std::string text() const { return fmt::format("{} row {} column {}", path.string(), row, quote(column)); }
};

Json json_of(const arrow::Array& array, int64_t index, const CellPlace& place, int depth);

// Calls `read` with the array cast to the class in `Arrays` that matches its type. False if no class matches.
template <class... Arrays, class Read>
bool read_as(const arrow::Array& array, Read read) {
  const auto read_one = [&]<class Array>(std::type_identity<Array>) {
    if (array.type_id() != Array::TypeClass::type_id) return false;
    read(static_cast<const Array&>(array));
    return true;
  };
  return (read_one(std::type_identity<Arrays>{}) || ...);
}

Json json_of_range(const arrow::Array& values, int64_t first, int64_t count, const CellPlace& place, int depth) {
  Json list = Json::array();
  for (int64_t i = 0; i < count; ++i) list.push_back(json_of(values, first + i, place, depth));
  return list;
}

Json json_of_struct(const arrow::Array& array, int64_t index, const CellPlace& place, int depth) {
  const auto& fields = static_cast<const arrow::StructArray&>(array);
  Json object = Json::object();
  for (int i = 0; i < fields.num_fields(); ++i) {
    object[fields.struct_type()->field(i)->name()] = json_of(*fields.field(i), index, place, depth);
  }
  return object;
}

// A map is an object if its keys are text, else a list of pairs.
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

// Converts one cell to JSON by the type of its array, recursively. Text must be UTF-8, because JSON and the tokenizer
// expect it.
Json json_of(const arrow::Array& array, int64_t index, const CellPlace& place, int depth) {
  TESSERA_CHECK(depth < 64, ErrorKind::kFormat, "[data.read] {}: nested deeper than 64 levels.", place.text());
  if (array.IsNull(index)) return nullptr;
  Json value;
  const auto number = [&](const auto& values) { value = values.Value(index); };
  const auto text = [&](const auto& values) {
    const std::string_view bytes = values.GetView(index);
    TESSERA_CHECK(is_valid_utf8(bytes), ErrorKind::kFormat, "[data.read] {}: the text is no UTF-8: {}", place.text(),
                  quote(bytes));
    value = std::string(bytes);
  };
  const auto binary = [&](const auto& values) {
    const std::string_view bytes = values.GetView(index);
    value = Json::binary({bytes.begin(), bytes.end()});
  };
  const auto list = [&](const auto& lists) {
    value = json_of_range(*lists.values(), lists.value_offset(index), lists.value_length(index), place, depth + 1);
  };
  if (read_as<arrow::BooleanArray, arrow::Int8Array, arrow::Int16Array, arrow::Int32Array, arrow::Int64Array,
              arrow::UInt8Array, arrow::UInt16Array, arrow::UInt32Array, arrow::UInt64Array, arrow::FloatArray,
              arrow::DoubleArray>(array, number) ||
      read_as<arrow::StringArray, arrow::LargeStringArray, arrow::StringViewArray>(array, text) ||
      read_as<arrow::BinaryArray, arrow::LargeBinaryArray, arrow::FixedSizeBinaryArray>(array, binary) ||
      read_as<arrow::ListArray, arrow::LargeListArray, arrow::FixedSizeListArray>(array, list)) {
    return value;
  }
  using arrow::Type;
  switch (array.type_id()) {
    case Type::NA:
      return nullptr;
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
    default: {  // dates, times, decimals: in Arrow's text form
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
      properties.enable_buffered_stream();  // reads pages on demand, not whole columns
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

  bool next(RecordRow& row) override {
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
  // Converts errors of libparquet, which reports some by exceptions, to Error kFormat with the file's name.
  template <class Action>
  void guarded(const std::string& place, Action action) {
    try {
      action();
    } catch (const Error&) {
      throw;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      raise(ErrorKind::kFormat, "[data.read] {}{}: not a complete Parquet file: {} Fetch or write it again.",
            path_.string(), place, escape(error.what(), 300));
    }
  }

  std::filesystem::path path_;
  std::unique_ptr<parquet::arrow::FileReader> reader_;
  std::shared_ptr<arrow::RecordBatchReader> batches_;
  std::shared_ptr<arrow::RecordBatch> batch_;
  int64_t at_ = 0;      // next row in the batch
  int64_t number_ = 0;  // number of the last row, from 1
};

}  // namespace

bool reads_parquet() { return true; }

std::unique_ptr<RowSource> open_parquet(const std::filesystem::path& path) {
  return std::make_unique<ParquetRows>(path);
}

}  // namespace tessera::data
