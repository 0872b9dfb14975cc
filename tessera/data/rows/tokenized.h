// Makes the packed rows of a data set from its sources (reads, tokenizes, packs), or finds them in the cache.
//
//   auto rows = load_packed_rows(options, {source}, tokenizer, chat_template);
//
// Internal to dataset.cc.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "tessera/data/rows/dataset.h"
#include "tessera/data/rows/packed_rows.h"

namespace tessera::data {

struct LoadedRows {
  std::shared_ptr<const PackedRows> rows;
  UnchangedFiles files;  // the source files, in their state before they were read
};

// Loads all files of `data_sources` as one set of packed rows. Errors as in Dataset::load().
LoadedRows load_packed_rows(const DataOptions& options, std::span<const DataSource> data_sources,
                            const text::Tokenizer& tokenizer, const std::optional<text::ChatTemplate>& chat_template);

}  // namespace tessera::data
