// The rows of a rank: what a step is cut into, what is held out, and the start of one that a sample goes on from. No
// communication.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/data/rows/batch.h"
#include "tessera/data/rows/dataset.h"
#include "tessera/train/run/run_mesh.h"

namespace tessera::train {

// A batch in parts of `rows` rows; the last may have fewer.
std::vector<data::Batch> micro_batches(const data::Batch& batch, int64_t rows);

// The share of a data-parallel rank in all rows, in batches of `rows`, with the tokens that this rank has of them. One
// that has fewer rows than another is given rows of padding, so that all take as many steps.
std::vector<data::Batch> share_of_rows(const data::Dataset& dataset, int64_t rows, const RunMesh& place);

// Of a batch of one row, on the CPU: the tokens up to the first that is learnt; where everything is (plain text), the
// first few.
std::vector<int64_t> sample_prompt(const data::Batch& row);

}  // namespace tessera::train
