// Containers of records: file formats that hold a sequence of JSON objects.
//
//   auto source = open_rows(path, container_of(path));
//   RecordRow row;
//   while (source->next(row)) use(row.value, row.where);
//
// Memory does not depend on the size of the file: one record of at most 256 MiB is in memory at a time, or one batch of
// rows of a Parquet file. One source belongs to one thread.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "tessera/base/text/json.h"

namespace tessera::data {

inline constexpr size_t kRecordLimitBytes = size_t{256} << 20;
// The limits for the JSON of one record. With exact_numbers, numbers in tools and tool calls keep all their digits.
inline constexpr JsonLimits kRecordLimits{
    .max_bytes = kRecordLimitBytes, .max_depth = 100, .max_keys = 10'000'000, .exact_numbers = true};

struct RecordRow {
  Json value;                     // an object, columns by name
  std::string where;              // for messages: "FILE line N", "FILE line N column M" or "FILE row N"
  bool nulls_are_absent = false;  // true for Parquet, where each struct has all its fields
};

class RowSource {
 public:
  virtual ~RowSource() = default;
  // Reads the next row. False at the end. Errors kIo and kFormat name file and place.
  virtual bool next(RecordRow& row) = 0;
};

enum class DataContainer {
  kText,       // one stream of text
  kJsonLines,  // a JSON object in each line; blank lines are skipped
  kJsonArray,  // one array of objects
  kParquet,
  kMegatron,  // token ids, megatron.h
};
const char* to_string(DataContainer container);

// Returns the container of a file. A file is recognised by its name (.jsonl, .ndjson, .json, .txt, .parquet, .bin,
// .idx, each also with .gz appended). A .json file that begins with '[' is an array, else JSON lines. A file with
// another name is recognised by its first bytes: PAR1 is Parquet, '{' JSON lines, anything else text. Error kIo when
// the file cannot be read.
DataContainer container_of(const std::filesystem::path& path);

// Opens any container except kText and kMegatron. Errors: kIo, kFormat; kConfig for Parquet in a build without
// libparquet.
std::unique_ptr<RowSource> open_rows(const std::filesystem::path& path, DataContainer container);

std::unique_ptr<RowSource> open_json_lines(const std::filesystem::path& path);
std::unique_ptr<RowSource> open_json_array(const std::filesystem::path& path);
// Whether this build reads Parquet.
bool reads_parquet();
std::unique_ptr<RowSource> open_parquet(const std::filesystem::path& path);

}  // namespace tessera::data
