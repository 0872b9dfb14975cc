// The records of training files.
//
//   for (const auto& file : files_of(source, "train"))
//     read_records(file, source, [&](Record record) { ... });
//
// A text file is one stream of text, given in parts of about 16 MiB (one part up to there). Anything that does not fit
// is an Error that names file, line and what was found.
#pragma once

#include <functional>

#include "tessera/data/records/data_source.h"
#include "tessera/data/records/record.h"

namespace tessera::data {

// The kind of the file's records, its stream or its ids; nothing for an empty file. Error kIo and kFormat for files,
// kConfig for a format that the container cannot have.
std::optional<RecordKind> read_records(const DataFile& file, const SourceOptions& options,
                                       const std::function<void(Record)>& visit);

}  // namespace tessera::data
