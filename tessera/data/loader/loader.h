// The order in which a data set is trained on.
//
//   DataLoader loader(dataset, /*seed=*/42, /*shuffle=*/true);
//   Batch mine = loader.next_global_slice(/*global_batch=*/8, /*first_row=*/rank * 4, /*row_count=*/4);
//
// Global sample g is row permutation_e(g mod rows) of epoch e = g / rows: a function of seed and g alone, so the order
// does not depend on how many ranks share it, and a resumed run goes on exactly, on another number of ranks too. Epochs
// follow each other without a gap: a batch may hold the last rows of one epoch and the first of the next, each row is
// seen once an epoch, and nothing is dropped or repeated. Of a mixture, sample g is of the source that mixture.h gives;
// its n-th draw of a source is that source's row permutation_e(n mod rows) of the source's own epoch e = n / rows, and
// an epoch of the whole are as many samples as there are rows. A run may end after a number of samples, so that its
// last batch is short: the rows that it lacks are padding, behind the others. Not thread-safe; each rank has its own
// and takes the same steps.
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
  // `end`: samples of the run.
  DataLoader(std::shared_ptr<const Dataset> dataset, uint64_t seed, bool shuffle,
             int64_t end = std::numeric_limits<int64_t>::max());

  // Rows [first_row, first_row + row_count) of the next global batch, and moves on by global_batch, to `end` at most.
  // Error kConfig for a slice outside of the batch.
  Batch next_global_slice(int64_t global_batch, int64_t first_row, int64_t row_count);
  // Moves on without reading.
  void advance(int64_t global_batch);

  int64_t next_sample() const { return next_sample_; }  // global index, over all epochs
  int64_t samples_left() const { return std::max<int64_t>(end_ - next_sample_, 0); }
  int64_t epoch() const;                 // of the next sample
  int64_t row_of(int64_t sample) const;  // the row of a global sample; cheap where samples rise

  nlohmann::json state() const;
  // The state may be of a run with another end. Error kConfig when it is of other data, another seed or another order;
  // kFormat when it is none.
  void load_state(const nlohmann::json& state);

 private:
  std::shared_ptr<const Dataset> dataset_;
  uint64_t seed_;
  bool shuffle_;
  int64_t end_;
  int64_t next_sample_ = 0;
  mutable std::optional<Mixture> mixture_;  // where it was asked last
};

}  // namespace tessera::data
