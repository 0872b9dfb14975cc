// Containers of records: files that hold one JSON object after another, however they hold them.
//
//   auto source = open_rows(path, container_of(path));
//   Row row;
//   while (source->next(row)) use(row.value, row.where);
//
// Memory does not depend on the size of the file: a record of at most 256 MiB is held, of Parquet a batch of rows. One
// source belongs to one thread.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "tessera/base/text/json.h"

namespace tessera::data {

inline constexpr size_t kRecordLimitBytes = size_t{256} << 20;
// A record may be long, but is no tree. Numbers of tools and of their calls keep their digits.
inline constexpr JsonLimits kRecordLimits{
    .max_bytes = kRecordLimitBytes, .max_depth = 100, .max_keys = 10'000'000, .exact_numbers = true};

struct Row {
  Json value;                     // an object, columns by name
  std::string where;              // "FILE line N", "FILE line N column M", "FILE row N": for messages
  bool nulls_are_absent = false;  // Parquet gives each struct all its fields
};

class RowSource {
 public:
  virtual ~RowSource() = default;
  // False when nothing is left. Error kIo and kFormat name file and place.
  virtual bool next(Row& row) = 0;
};

enum class Container {
  kText,       // one stream of text
  kJsonLines,  // a JSON object a line, blank lines skipped
  kJsonArray,  // one array of objects
  kParquet,
  kMegatron,  // token ids, megatron.h
};
const char* to_string(Container container);

// By the name (.jsonl, .ndjson, .json, .txt, .parquet, .bin, .idx, each also with .gz behind it) and, where that does
// not tell, by the first bytes: PAR1 is Parquet, '{' JSON lines, anything else text. A .json that begins with '[' is an
// array, another one JSON lines. Error kIo when the file cannot be read.
Container container_of(const std::filesystem::path& path);

// Of every container but kText and kMegatron. Error kIo, kFormat; kConfig for Parquet in a build without it.
std::unique_ptr<RowSource> open_rows(const std::filesystem::path& path, Container container);

std::unique_ptr<RowSource> open_json_lines(const std::filesystem::path& path);
std::unique_ptr<RowSource> open_json_array(const std::filesystem::path& path);
// Whether this build reads Parquet.
bool reads_parquet();
std::unique_ptr<RowSource> open_parquet(const std::filesystem::path& path);

}  // namespace tessera::data
