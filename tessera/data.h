// Training data: files of records, which are tokenized and packed into rows on disk, and the order in which the ranks
// read these rows.
//
//   const auto dataset = data::Dataset::load(options, tokenizer);
#pragma once

#include "tessera/data/loader/loader.h"
#include "tessera/data/records/data_source.h"
#include "tessera/data/records/sources.h"
#include "tessera/data/rows/batch.h"
#include "tessera/data/rows/dataset.h"
#include "tessera/text.h"
