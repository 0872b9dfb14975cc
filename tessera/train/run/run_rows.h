// Rows of a rank: micro-batches of a step, batches for validation, and the prompt of a sample. No communication.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/data/rows/batch.h"
#include "tessera/data/rows/dataset.h"
#include "tessera/train/run/run_mesh.h"

namespace tessera::train {

// Splits a batch into micro-batches of `rows` rows; the last one may have fewer.
std::vector<data::Batch> micro_batches(const data::Batch& batch, int64_t rows);

// This data parallel rank's share of all rows, in batches of `rows` rows, with the tokens of this rank's cp shard. A
// rank with fewer rows than others gets rows of padding, so that all ranks have the same number of batches.
std::vector<data::Batch> batches_of_rank(const data::Dataset& dataset, int64_t rows, const RunMesh& run_mesh);

// The prompt of a sample, from a batch of one row on the CPU: the tokens of the first document up to the first token
// that is a label (the prompt of a chat, for example). If all tokens are labels (plain text): at most the first 16.
std::vector<int64_t> sample_prompt(const data::Batch& row);

}  // namespace tessera::train
