// From the sources of a data set to its packed rows: reads, tokenizes, packs, or finds what was made before.
//
//   auto rows = tokenized(options, {source}, tokenizer, chat_template);
//
// Internal to dataset.cc.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "tessera/data/rows/dataset.h"
#include "tessera/data/rows/packed_rows.h"

namespace tessera::data {

struct Tokenized {
  std::shared_ptr<const PackedRows> rows;
  UnchangedFiles files;  // that they were made from, as they were then
};

// All files of the sources as one set. Errors as Dataset::load.
Tokenized tokenized(const DataOptions& options, std::span<const DataSource> sources, const text::Tokenizer& tokenizer,
                    const std::optional<text::ChatTemplate>& chat_template);

}  // namespace tessera::data
