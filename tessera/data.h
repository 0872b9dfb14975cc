// Training data: files of records, tokenized and packed into rows on disk, and the order in which ranks read them.
//
//   const auto dataset = data::Dataset::load(options, tokenizer);
#pragma once

#include "tessera/data/loader/loader.h"
#include "tessera/data/records/data_source.h"
#include "tessera/data/records/sources.h"
#include "tessera/data/rows/batch.h"
#include "tessera/data/rows/dataset.h"
#include "tessera/text.h"
