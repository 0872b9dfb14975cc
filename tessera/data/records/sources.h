// The records of training files.
//
//   for (const auto& file : files_of(source, "train"))
//     read_records(file, source, [&](TrainingRecord record) { ... });
//
// A text file is one stream of text, visited in parts of about 16 MiB (a file up to that size is one part). Invalid
// input is an Error that names the file, the line and the text found.
#pragma once

#include <functional>

#include "tessera/data/records/data_source.h"
#include "tessera/data/records/record.h"

namespace tessera::data {

// Calls `visit` for each record of the file. Returns the kind of the records, or nullopt for an empty file. Errors: kIo
// and kFormat for the file, kConfig for a format that the container cannot have.
std::optional<RecordKind> read_records(const DataFile& file, const SourceOptions& options,
                                       const std::function<void(TrainingRecord)>& visit);

}  // namespace tessera::data
