// The path of a data set (a file, a folder of shards or a pattern of names) and the options to read its records.
//
//   DataSource source("HuggingFaceH4/ultrachat", {.split = "train_sft"});
//   for (const auto& file : files_of(source, "train")) ...
//
// Plain values. docs/data.md lists the paths and options that users may write.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/data/records/row_source.h"

namespace tessera::data {

struct SourceOptions {
  std::string format = "auto";                      // one of kFormats
  std::map<std::string, std::string> columns = {};  // Tessera's column name -> the file's column name
  std::string split = {};                           // split of a folder; empty: chosen by purpose
  double weight = 0;                                // weight in a mixture; 0: none
};

struct DataSource : SourceOptions {
  DataSource(std::string given_path, SourceOptions options = {})
      : SourceOptions(std::move(options)), path(std::move(given_path)) {}
  std::string path;
};

inline constexpr const char* kFormats[] = {"auto",   "text",       "jsonl",      "chat",    "sharegpt",
                                           "alpaca", "completion", "preference", "megatron"};

struct DataFile {
  std::filesystem::path path;
  DataContainer container;
};

// The files of a source, sorted by name. In a folder these are the files of `split` (if empty, of `purpose`: "train" or
// "validation"), recognised by file or folder name as in the Hub's data sets; all files when no name contains a split.
// All shards NAME-00000-of-00010, ... must exist. Errors: kIo when no file exists; kConfig for a folder of several data
// sets and for a missing split, with a message that lists the splits of the folder; kFormat for a missing shard.
std::vector<DataFile> files_of(const DataSource& source, const std::string& purpose);

}  // namespace tessera::data
