// The order in which a data set is trained on.
//
//   DataLoader loader(dataset, /*seed=*/42, /*shuffle=*/true);
//   Batch mine = loader.next_global_slice(/*global_batch=*/8, /*first_row=*/rank * 4, /*row_count=*/4);
//
// Global sample g is row permutation_e(g mod rows) of epoch e = g / rows. This depends on seed and g alone, so the
// order is the same for any number of ranks, and a resumed run continues exactly, on another number of ranks too.
// Epochs follow each other without a gap: a batch may hold the last rows of one epoch and the first of the next. Each
// row is read once per epoch; no row is dropped or repeated.
//
// In a mixture, mixture.h chooses the source of sample g. The n-th draw from a source is that source's row
// permutation_e(n mod rows) of the source's own epoch e = n / rows. One epoch of the mixture has as many samples as all
// sources have rows.
//
// A run may end after a given number of samples. Its last batch is then filled with rows of padding at the end. Not
// thread-safe; each rank has its own loader and must make the same calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "tessera/data/loader/mixture.h"
#include "tessera/data/rows/batch.h"
#include "tessera/data/rows/dataset.h"

namespace tessera::data {

class DataLoader {
 public:
  // `end`: the number of samples after which the run ends.
  DataLoader(std::shared_ptr<const Dataset> dataset, uint64_t seed, bool shuffle,
             int64_t end = std::numeric_limits<int64_t>::max());

  // Returns rows [first_row, first_row + row_count) of the next global batch and advances by global_batch samples, at
  // most to `end`. Error kConfig for a slice outside of the batch.
  Batch next_global_slice(int64_t global_batch, int64_t first_row, int64_t row_count);
  // Advances by global_batch samples, at most to `end`, without reading rows.
  void advance(int64_t global_batch);

  int64_t next_sample() const { return next_sample_; }  // global index, over all epochs
  int64_t samples_left() const { return std::max<int64_t>(end_ - next_sample_, 0); }
  int64_t epoch() const;                 // epoch of the next sample
  int64_t row_of(int64_t sample) const;  // the row of a global sample; cheap in rising order

  nlohmann::json state() const;
  // Continues at the next sample of `state`. The loader that made `state` may have had another `end`. Errors: kConfig
  // for the state of other data, another seed or another order; kFormat for JSON that is not a loader's state.
  void load_state(const nlohmann::json& state);

 private:
  std::shared_ptr<const Dataset> dataset_;
  uint64_t seed_;
  bool shuffle_;
  int64_t end_;
  int64_t next_sample_ = 0;
  mutable std::optional<Mixture> mixture_;  // cached at the last queried sample
};

}  // namespace tessera::data
