#include "tessera/data/dataset.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <xxhash.h>

#include <algorithm>
#include <deque>

#include "tessera/base/error.h"
#include "tessera/data/samples.h"
#include "tessera/data/shuffle.h"
#include "tessera/data/sources.h"
#include "tessera/kernels/ignored_label.h"

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
  TESSERA_CHECK(!options.paths.empty(), ErrorKind::kConfig, "[data.load] no files are given. Name at least one.");
  TESSERA_CHECK(options.sequence_length >= 2 && options.sequence_length <= (int64_t{1} << 24), ErrorKind::kConfig,
                "[data.load] sequence_length: found {}, wanted 2 to {}.", options.sequence_length, int64_t{1} << 24);
  check_choice("format", options.format, std::initializer_list<const char*>{"auto", "text", "jsonl", "chat"});
  check_choice("overlong", options.overlong, std::initializer_list<const char*>{"truncate", "drop", "error"});
}

}  // namespace

struct Dataset::Builder {
  Dataset& set;

  void add(const Record& record, const SampleMaker& maker);
  void add_piece(const int32_t* tokens, const uint8_t* learnt, size_t size);
  void pack();
  void finish();
  size_t samples() const { return set.sample_begin_.size() - 1; }
  size_t length(size_t sample) const { return set.sample_begin_[sample + 1] - set.sample_begin_[sample]; }
};

void Dataset::Builder::add(const Record& record, const SampleMaker& maker) {
  const Sample sample = maker.make(record);
  const auto limit = static_cast<size_t>(set.options_.sequence_length);
  size_t size = sample.tokens.size();
  if (record.kind == RecordKind::kStream) {
    for (size_t at = 0; at < size; at += limit) {
      // A last piece of one token has nothing to predict and is no loss.
      if (at == 0 || size - at > 1) add_piece(&sample.tokens[at], &sample.learnt[at], std::min(limit, size - at));
    }
    return;
  }
  if (size > limit) {
    TESSERA_CHECK(set.options_.overlong != "error", ErrorKind::kFormat,
                  "[data.load] {}: {} tokens, but a row has {}. Raise data.sequence_length, or set data.overlong to "
                  "truncate or drop.",
                  record.where, size, limit);
    if (set.options_.overlong == "drop") {
      ++set.stats_.dropped;
      return;
    }
    ++set.stats_.truncated;
    size = limit;
  }
  add_piece(sample.tokens.data(), sample.learnt.data(), size);
}

void Dataset::Builder::add_piece(const int32_t* tokens, const uint8_t* learnt, size_t size) {
  const auto labels = size < 2 ? 0 : std::count(learnt + 1, learnt + size, uint8_t{1});
  if (labels == 0) {
    ++set.stats_.unlabelled;
    return;
  }
  set.tokens_.insert(set.tokens_.end(), tokens, tokens + size);
  set.learnt_.insert(set.learnt_.end(), learnt, learnt + size);
  set.sample_begin_.push_back(set.tokens_.size());
  ++set.stats_.documents;
  set.stats_.tokens += static_cast<int64_t>(size);
  set.stats_.label_tokens += labels;
}

// First-fit over the rows still open; the oldest is closed when there are many, so the cost stays linear.
void Dataset::Builder::pack() {
  constexpr size_t kOpenRows = 64;
  constexpr uint64_t kPackingEpoch = ~uint64_t{0};  // an order that no epoch of the loader has
  const auto limit = static_cast<size_t>(set.options_.sequence_length);
  const auto count = static_cast<int64_t>(samples());
  struct Row {
    std::vector<size_t> samples;
    size_t used = 0;
  };
  std::deque<Row> rows;
  size_t first_open = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto sample =
        static_cast<size_t>(set.options_.shuffle ? permuted(i, count, set.options_.seed, kPackingEpoch) : i);
    size_t at = set.options_.packing ? first_open : rows.size();
    while (at < rows.size() && rows[at].used + length(sample) > limit) ++at;
    if (at == rows.size()) rows.emplace_back();
    rows[at].samples.push_back(sample);
    rows[at].used += length(sample);
    if (rows.size() - first_open > kOpenRows) ++first_open;
  }
  set.row_begin_.push_back(0);
  for (const auto& row : rows) {
    set.row_samples_.insert(set.row_samples_.end(), row.samples.begin(), row.samples.end());
    set.row_begin_.push_back(set.row_samples_.size());
  }
}

void Dataset::Builder::finish() {
  TESSERA_CHECK(set.stats_.documents > 0, ErrorKind::kFormat,
                "[data.load] {}{}: the data set is empty ({} samples are too long, {} hold nothing to learn). Give it "
                "other files.",
                set.options_.paths.front(), set.options_.paths.size() > 1 ? ", ..." : "", set.stats_.dropped,
                set.stats_.unlabelled);
  pack();
  XXH64_hash_t hash = XXH3_64bits(set.tokens_.data(), set.tokens_.size() * sizeof(int32_t));
  const auto include = [&](const void* data, size_t bytes) { hash = XXH3_64bits_withSeed(data, bytes, hash); };
  include(set.learnt_.data(), set.learnt_.size());
  include(set.sample_begin_.data(), set.sample_begin_.size() * sizeof(size_t));
  include(set.row_samples_.data(), set.row_samples_.size() * sizeof(size_t));
  include(set.row_begin_.data(), set.row_begin_.size() * sizeof(size_t));
  include(&set.options_.sequence_length, sizeof(int64_t));
  set.fingerprint_ = fmt::format("{:016x}", static_cast<uint64_t>(hash));
}

std::shared_ptr<const Dataset> Dataset::load(const DataOptions& options, const text::Tokenizer& tokenizer,
                                             const std::optional<text::ChatTemplate>& chat_template) {
  check_options(options);
  auto set = std::shared_ptr<Dataset>(new Dataset());
  set->options_ = options;
  // Nothing reads padding but the embedding: a padding token that the model does not know gives way to one that it
  // knows.
  for (const auto token : {tokenizer.eos_id(), tokenizer.pad_id()}) {
    if (token && (options.vocab_size == 0 || *token < options.vocab_size)) set->padding_token_ = *token;
  }
  set->sample_begin_.push_back(0);
  const SampleMaker maker(tokenizer, chat_template, options.vocab_size);
  Builder builder{*set};
  for (const auto& path : options.paths) {
    read_records(path, options.format, [&](const Record& record) { builder.add(record, maker); });
  }
  builder.finish();
  return set;
}

Batch Dataset::rows(std::span<const int64_t> indices) const {
  const auto count = static_cast<int64_t>(indices.size());
  const int64_t length = options_.sequence_length;
  auto tokens = at::full({count, length}, padding_token_, at::kLong);
  auto labels = at::full({count, length}, kIgnoredLabel, at::kLong);
  auto positions = at::full({count, length}, 0, at::kLong);
  auto documents = at::full({count, length}, kPadding, at::kLong);
  for (int64_t row = 0; row < count; ++row) {
    const int64_t index = indices[static_cast<size_t>(row)];
    TESSERA_CHECK(index >= 0 && index < rows(), ErrorKind::kInternal, "[data.rows] row {} of {}", index, rows());
    int64_t at = row * length;
    int64_t* token = tokens.mutable_data_ptr<int64_t>();
    int64_t* label = labels.mutable_data_ptr<int64_t>();
    int64_t* position = positions.mutable_data_ptr<int64_t>();
    int64_t* document = documents.mutable_data_ptr<int64_t>();
    const size_t first = row_begin_[static_cast<size_t>(index)], last = row_begin_[static_cast<size_t>(index) + 1];
    for (size_t place = first; place < last; ++place) {
      const size_t begin = sample_begin_[row_samples_[place]], end = sample_begin_[row_samples_[place] + 1];
      for (size_t i = begin; i < end; ++i, ++at) {
        token[at] = tokens_[i];
        position[at] = static_cast<int64_t>(i - begin);
        document[at] = static_cast<int64_t>(place - first);
        if (i + 1 < end && learnt_[i + 1]) label[at] = tokens_[i + 1];
      }
    }
  }
  return make_batch(std::move(tokens), std::move(labels), std::move(positions), std::move(documents));
}

}  // namespace tessera::data
