#include "tessera/data/loader/loader.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/text/json.h"
#include "tessera/data/rows/shuffle.h"

namespace tessera::data {

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, uint64_t seed, bool shuffle, int64_t end)
    : dataset_(std::move(dataset)), seed_(seed), shuffle_(shuffle), end_(end) {
  if (!dataset_->weights().empty()) mixture_.emplace(dataset_->weights());
}

int64_t DataLoader::epoch() const { return next_sample_ / dataset_->rows(); }

// The row of a global sample. Each source of a mixture is shuffled by its own seed (seed_ + its index), so sources of
// equal size do not follow the same permutation.
int64_t DataLoader::row_of(int64_t sample) const {
  const auto in_epoch = [&](int64_t number, int64_t rows, uint64_t seed) {
    const int64_t index = number % rows;
    return shuffle_ ? permuted_index(index, rows, seed, static_cast<uint64_t>(number / rows)) : index;
  };
  if (!mixture_) return in_epoch(sample, dataset_->rows(), seed_);
  const auto draw = mixture_->at(sample);
  return dataset_->first_row_of_source(draw.source) +
         in_epoch(draw.index, dataset_->rows_of_source(draw.source), seed_ + draw.source);
}

Batch DataLoader::next_global_slice(int64_t global_batch, int64_t first_row, int64_t row_count) {
  TESSERA_CHECK(first_row >= 0 && row_count >= 1 && first_row + row_count <= global_batch, ErrorKind::kConfig,
                "[data.loader] rows {} to {} of a global batch of {}. The "
                "slices of the ranks must be inside the global batch.",
                first_row, first_row + row_count, global_batch);
  std::vector<int64_t> rows;
  for (int64_t i = first_row; i < first_row + row_count; ++i) {
    rows.push_back(i < samples_left() ? row_of(next_sample_ + i) : kPaddingRow);
  }
  advance(global_batch);
  return dataset_->rows(rows);
}

void DataLoader::advance(int64_t global_batch) { next_sample_ += std::min(global_batch, samples_left()); }

nlohmann::json DataLoader::state() const {
  return {{"next_sample", next_sample_},
          {"seed", seed_},
          {"shuffle", shuffle_},
          {"rows", dataset_->rows()},
          {"data", dataset_->fingerprint()}};
}

// All fields of `state` except next_sample must equal those of this loader's state(). Then both loaders have the same
// order of samples.
void DataLoader::load_state(const nlohmann::json& state) {
  nlohmann::json other = state;
  const int64_t next = JsonReader(state, "[data.resume] the saved data position is damaged")
                           .integer("next_sample", std::nullopt, 0, std::numeric_limits<int64_t>::max());
  other["next_sample"] = next_sample_;
  const nlohmann::json own = this->state();
  TESSERA_CHECK(other == own, ErrorKind::kConfig,
                "[data.resume] the data differ from the data of the checkpoint: saved "
                "{}, found {}. Resume with the same "
                "files, seed and data settings, or start anew in another "
                "checkpoint.dir or with checkpoint.resume=never, "
                "which moves the old run aside.",
                other.dump(), own.dump());
  next_sample_ = next;
}

}  // namespace tessera::data
