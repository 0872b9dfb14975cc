#include "tessera/data/rows/dataset.h"

#include <ATen/ops/full.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/ignored_label.h"
#include "tessera/base/log.h"
#include "tessera/data/rows/tokenized.h"

namespace tessera::data {
namespace {

template <class Names>
void check_choice(const char* key, const std::string& value, const Names& names) {
  std::string wanted;
  for (const char* name : names) {
    if (value == name) return;
    wanted += wanted.empty() ? name : std::string(" | ") + name;
  }
  raise(ErrorKind::kConfig, "[data.load] {}: found '{}', wanted {}.", key, value, wanted);
}

void check_options(const DataOptions& options) {
  TESSERA_CHECK(!options.sources.empty(), ErrorKind::kConfig, "[data.load] no files are given. Name at least one.");
  TESSERA_CHECK(options.sequence_length >= 2 && options.sequence_length <= (int64_t{1} << 24), ErrorKind::kConfig,
                "[data.load] sequence_length: found {}, wanted 2 to {}.", options.sequence_length, int64_t{1} << 24);
  check_choice("format", options.format, kFormats);
  check_choice("overlong", options.overlong, std::initializer_list<const char*>{"truncate", "drop", "error"});
  for (const auto& source : options.sources) {
    check_choice(("format of " + source.path).c_str(), source.format, kFormats);
    TESSERA_CHECK(source.weight >= 0 && source.weight <= 1e12, ErrorKind::kConfig,
                  "[data.load] {}: found the weight {}, wanted a number above 0.", source.path, source.weight);
  }
}

void add(DataStats& sum, const DataStats& one) {
  sum.documents += one.documents;
  sum.tokens += one.tokens;
  sum.label_tokens += one.label_tokens;
  sum.truncated += one.truncated;
  sum.dropped += one.dropped;
  sum.unlabelled += one.unlabelled;
  sum.cut_away += one.cut_away;
}

}  // namespace

std::shared_ptr<const Dataset> Dataset::load(const DataOptions& options, const text::Tokenizer& tokenizer,
                                             const std::optional<text::ChatTemplate>& chat_template) {
  check_options(options);
  auto set = std::shared_ptr<Dataset>(new Dataset());
  const std::span<const DataSource> sources = options.sources;
  const bool mixture = std::ranges::any_of(sources, [](const auto& one) { return one.weight > 0; });
  const auto add_part = [&](std::span<const DataSource> of) {
    auto made = load_packed_rows(options, of, tokenizer, chat_template);
    set->parts_.push_back(std::move(made.rows));
    set->files_.push_back(std::move(made.files));
  };
  // Without weights all sources are packed together. In a mixture each source is packed separately, so its rows can be
  // drawn by weight; a source without a weight has weight 1.
  if (!mixture) {
    add_part(sources);
    set->fingerprint_ = set->parts_.front()->fingerprint();
  } else {
    for (size_t i = 0; i < sources.size(); ++i) {
      add_part(sources.subspan(i, 1));
      set->weights_.push_back(sources[i].weight > 0 ? sources[i].weight : 1);
      set->fingerprint_ += fmt::format("{} {};", set->parts_.back()->fingerprint(), set->weights_.back());
    }
    set->fingerprint_ = fmt::format("{:016x}", XXH3_64bits(set->fingerprint_.data(), set->fingerprint_.size()));
  }
  set->sequence_length_ = options.sequence_length;
  for (const auto& part : set->parts_) {
    set->first_row_.push_back(set->rows_);
    set->rows_ += part->rows();
    add(set->stats_, part->stats());
  }
  const auto dropped = set->stats_.describe_dropped(options.sequence_length);
  if (!options.quiet && !dropped.empty()) {
    const auto& stats = set->stats_;
    log_info("[data.load] data.{}, of {} samples: {}", options.purpose,
             stats.documents + stats.dropped + stats.unlabelled, dropped);
  }
  return set;
}

std::optional<std::filesystem::path> Dataset::changed_file() const {
  for (const auto& files : files_) {
    if (auto path = files.changed()) return path;
  }
  return std::nullopt;
}

// The label of a token is the next token of the same sample, if that token is trained on; the last token of a sample
// has no label. Positions the loop does not reach keep the padding values.
Batch Dataset::rows(std::span<const int64_t> indices) const {
  const auto count = static_cast<int64_t>(indices.size());
  const int64_t length = sequence_length_;
  auto tokens = at::full({count, length}, parts_.front()->padding_token(), at::kLong);
  auto labels = at::full({count, length}, kIgnoredLabel, at::kLong);
  auto positions = at::full({count, length}, 0, at::kLong);
  auto documents = at::full({count, length}, kPadding, at::kLong);
  int64_t* token = tokens.mutable_data_ptr<int64_t>();
  int64_t* label = labels.mutable_data_ptr<int64_t>();
  int64_t* position = positions.mutable_data_ptr<int64_t>();
  int64_t* document = documents.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < count; ++row) {
    const int64_t index = indices[static_cast<size_t>(row)];
    if (index == kPaddingRow) continue;
    TESSERA_CHECK(index >= 0 && index < rows(), ErrorKind::kInternal, "[data.rows] row {} of {}", index, rows());
    const auto part = static_cast<size_t>(std::ranges::upper_bound(first_row_, index) - first_row_.begin()) - 1;
    int64_t at = row * length, number = 0;
    parts_[part]->read(index - first_row_[part], [&](std::span<const PackedToken> sample) {
      for (size_t i = 0; i < sample.size(); ++i, ++at) {
        token[at] = sample[i].id();
        position[at] = static_cast<int64_t>(i);
        document[at] = number;
        if (i + 1 < sample.size() && sample[i + 1].has_label()) label[at] = sample[i + 1].id();
      }
      ++number;
    });
  }
  return make_batch(std::move(tokens), std::move(labels), std::move(positions), std::move(documents));
}

}  // namespace tessera::data
