// What a data set is named by: a file, a folder of shards or a pattern of names, and how its records are read.
//
//   DataSource source("HuggingFaceH4/ultrachat", {.split = "train_sft"});
//   for (const auto& file : files_of(source, "train")) ...
//
// Plain values. docs/data.md says what users may write.
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
  std::map<std::string, std::string> columns = {};  // our name -> the file's
  std::string split = {};                           // of a folder; empty: what it is for
  double weight = 0;                                // in a mixture; 0: none is given
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
  Container container;
};

// The files of a source, in the order of their names. Of a folder the files of `split` (else of `purpose`, "train" or
// "validation") as the Hub's data sets name them, by file or by folder; all where none is named after a split; shards
// NAME-00000-of-00010 must all be there. Error kIo when nothing is there; kConfig for a folder of several data sets and
// for a split that it has not, which name what it has; kFormat for a missing shard.
std::vector<DataFile> files_of(const DataSource& source, const std::string& purpose);

}  // namespace tessera::data
