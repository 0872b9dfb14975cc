#include "tessera/data/rows/tokenized.h"

#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json.h"
#include "tessera/base/version.h"
#include "tessera/data/records/parallel_sample_maker.h"
#include "tessera/data/records/sources.h"
#include "tessera/data/rows/cache.h"

namespace tessera::data {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct SourceFiles {
  SourceOptions options;
  std::vector<DataFile> files;
};

// Cuts samples to the length of a row, counts them in DataStats, and passes them to the PackedRowsWriter.
class RowBuilder {
 public:
  RowBuilder(const DataOptions& options, PackedRowsWriter& writer) : options_(options), writer_(writer) {}

  void add(const TrainingRecord& record, const TokenizedSample& sample) {
    if (record.kind == RecordKind::kStream || record.kind == RecordKind::kTokens) {
      stream_.tokens.insert(stream_.tokens.end(), sample.tokens.begin(), sample.tokens.end());
      stream_.loss_mask.insert(stream_.loss_mask.end(), sample.loss_mask.begin(), sample.loss_mask.end());
      return cut_stream(record.last);
    }
    const auto limit = static_cast<size_t>(options_.sequence_length);
    size_t size = sample.tokens.size();
    if (size > limit) {
      TESSERA_CHECK(options_.overlong != "error", ErrorKind::kFormat,
                    "[data.load] {}: {} tokens, but a row has {}. Raise data.sequence_length, or set data.overlong to "
                    "truncate or drop.",
                    record.where, size, limit);
      if (options_.overlong == "drop") {
        ++stats_.dropped;
        return;
      }
      ++stats_.truncated;
      size = limit;
    }
    const bool kept = add_piece({sample.tokens.data(), size}, {sample.loss_mask.data(), size});
    if (!kept && count_labels(sample.loss_mask) > 0) ++stats_.cut_away;
  }

  const DataStats& stats() const { return stats_; }

 private:
  // stream_ has the tokens of kStream and kTokens records that were not cut into rows yet. cut_stream() passes these
  // tokens to add_piece() in pieces of sequence_length tokens and, at the end of the stream (`ends`), also the shorter
  // rest. A rest of one token after at least one piece has no label; it is dropped and not counted in DataStats.
  void cut_stream(bool ends) {
    const auto limit = static_cast<size_t>(options_.sequence_length);
    const std::span<const int32_t> tokens = stream_.tokens;
    const std::span<const uint8_t> loss_mask = stream_.loss_mask;
    size_t at = 0;
    for (; at + limit <= tokens.size(); at += limit, stream_has_rows_ = true) {
      add_piece(tokens.subspan(at, limit), loss_mask.subspan(at, limit));
    }
    const size_t left = tokens.size() - at;
    if (!ends) {
      stream_.tokens.erase(stream_.tokens.begin(), stream_.tokens.begin() + static_cast<std::ptrdiff_t>(at));
      stream_.loss_mask.erase(stream_.loss_mask.begin(), stream_.loss_mask.begin() + static_cast<std::ptrdiff_t>(at));
      return;
    }
    if (left > 1 || (left == 1 && !stream_has_rows_)) add_piece(tokens.subspan(at), loss_mask.subspan(at));
    stream_ = {};
    stream_has_rows_ = false;
  }

  // Number of labels. The first token of a sample is not a label, because no token precedes it.
  static int64_t count_labels(std::span<const uint8_t> loss_mask) {
    return loss_mask.size() < 2 ? 0 : std::count(loss_mask.begin() + 1, loss_mask.end(), uint8_t{1});
  }

  // Passes the tokens of one sample, or of one piece of the stream, to writer_ and counts them in stats_. If no token
  // is a label, the tokens are left out: the function only increments stats_.unlabelled and returns false.
  bool add_piece(std::span<const int32_t> tokens, std::span<const uint8_t> loss_mask) {
    const int64_t labels = count_labels(loss_mask);
    if (labels == 0) {
      ++stats_.unlabelled;
      return false;
    }
    writer_.add(tokens, loss_mask);
    ++stats_.documents;
    stats_.tokens += static_cast<int64_t>(tokens.size());
    stats_.label_tokens += labels;
    return true;
  }

  const DataOptions& options_;
  PackedRowsWriter& writer_;
  TokenizedSample stream_;        // the rest of the stream, less than a row
  bool stream_has_rows_ = false;  // true when the current stream already has rows
  DataStats stats_;
};

// The token id for padding. Its value does not matter, but the embedding must have a row for it: the tokenizer's
// padding token if this is below vocab_size, else its EOS token if this is below vocab_size, else 0.
int64_t padding_token(const text::Tokenizer& tokenizer, int64_t vocab_size) {
  int64_t padding = 0;
  for (const auto token : {tokenizer.eos_id(), tokenizer.pad_id()}) {
    if (token && (vocab_size == 0 || *token < vocab_size)) padding = *token;
  }
  return padding;
}

// A Megatron source consists of two files.
std::vector<std::filesystem::path> paths_of(const DataFile& file) {
  if (file.container != DataContainer::kMegatron) return {file.path};
  auto index = file.path, ids = file.path;
  return {index.replace_extension(".idx"), ids.replace_extension(".bin")};
}

std::vector<std::filesystem::path> paths_of(const std::vector<SourceFiles>& sources) {
  std::vector<std::filesystem::path> paths;
  for (const auto& source : sources) {
    for (const auto& file : source.files) {
      for (auto& path : paths_of(file)) paths.push_back(std::move(path));
    }
  }
  return paths;
}

// The version of the code that makes rows. Raise it with every change of code that makes other rows of the same data,
// tokenizer and settings: reading of records, templates, tokenizing, labels, packing.
constexpr int kRowSemantics = 4;

// The current time for templates: 2024-07-26 12:00 UTC, the date that Llama's templates print without a clock. With the
// machine's time, a run resumed on another day would get other rows.
constexpr std::time_t kTimeOfTemplates = 1'721'995'200;

// Hash of everything that the rows depend on.
std::string key_of(const DataOptions& options, const std::vector<SourceFiles>& sources, const DataCache& cache,
                   int64_t padding) {
  Json key = {{"program", version()},
              {"semantics", kRowSemantics},
              {"tokenizer", options.tokenizer_identity},
              {"sequence_length", options.sequence_length},
              {"packing", options.packing},
              {"overlong", options.overlong},
              {"train_on_inputs", options.train_on_inputs},
              {"seed", options.seed},
              {"shuffle", options.shuffle},
              {"vocab_size", options.vocab_size},
              {"end_tokens", options.end_tokens},
              {"padding", padding}};
  for (const auto& source : sources) {
    Json files = Json::array();
    for (const auto& file : source.files) {
      files.push_back(to_string(file.container));
      for (const auto& path : paths_of(file)) files.push_back(cache.content_hash(path));
    }
    key["sources"].push_back(
        {{"format", source.options.format}, {"columns", source.options.columns}, {"files", files}});
  }
  const std::string text = key.dump(-1, ' ', false, Json::error_handler_t::replace);
  const auto hash = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string first_names(const std::vector<SourceFiles>& sources) {
  const auto paths = paths_of(sources);
  return paths.front().string() + (paths.size() > 1 ? ", ..." : "");
}

// Reads, tokenizes and packs all files, and writes the packed rows to `folder`. The description that is stored with the
// rows has one line for each file: its path, its container format and the kind of its records.
void write_rows(const DataOptions& options, const std::vector<SourceFiles>& sources, const std::string& key,
                int64_t padding, const SampleMaker& maker, const std::filesystem::path& folder) {
  PackedRowsWriter writer(folder, {.sequence_length = options.sequence_length,
                                   .packing = options.packing,
                                   .shuffle = options.shuffle,
                                   .seed = options.seed});
  RowBuilder builder(options, writer);
  std::vector<std::string> lines;
  const auto start = Clock::now();
  double last_log_seconds = 0;
  for (const auto& source : sources) {
    for (const auto& file : source.files) {
      ParallelSampleMaker samples(maker, [&](const TrainingRecord& record, const TokenizedSample& sample) {
        builder.add(record, sample);
        constexpr double kEvery = 15;
        if (options.quiet || seconds_since(start) - last_log_seconds < kEvery) return;
        last_log_seconds = seconds_since(start);
        log_info("[data.load] {}: {} samples, {:.1f} M tokens so far", record.where, builder.stats().documents,
                 static_cast<double>(builder.stats().tokens) / 1e6);
      });
      const auto kind = read_records(file, source.options, [&](TrainingRecord record) {
        TESSERA_CHECK(!options.stop || !*options.stop, ErrorKind::kInternal, "[data.load] {}: asked to stop.",
                      record.where);
        samples.add(std::move(record));
      });
      samples.finish();
      lines.push_back(
          fmt::format("{}: {}, {}", file.path.string(), to_string(file.container), kind ? to_string(*kind) : "empty"));
    }
  }
  const auto& stats = builder.stats();
  const auto dropped = stats.describe_dropped(options.sequence_length);
  TESSERA_CHECK(stats.documents > 0, ErrorKind::kFormat, "[data.load] {}: no sample is left to train on{}. {}.",
                first_names(sources), dropped.empty() ? "" : ": " + dropped,
                stats.cut_away + stats.dropped > 0 ? "Raise data.sequence_length, or give it other files"
                                                   : "Give it other files");
  writer.finish(key, stats, padding, lines);
  if (options.quiet) return;
  for (const auto& warning : maker.warnings()) log_warning("[data.load] {}: {}.", first_names(sources), warning);
}

}  // namespace

LoadedRows load_packed_rows(const DataOptions& options, std::span<const DataSource> data_sources,
                            const text::Tokenizer& tokenizer, const std::optional<text::ChatTemplate>& chat_template) {
  std::vector<SourceFiles> sources;
  for (const auto& source : data_sources) {
    SourceOptions merged = source;
    if (merged.format == "auto") merged.format = options.format;
    if (merged.columns.empty()) merged.columns = options.columns;
    DataSource asked(source.path, merged);
    sources.push_back({merged, files_of(asked, options.purpose)});
  }
  const auto start = Clock::now();
  const DataCache cache(options.cache_folder);
  // UnchangedFiles reads the FileStamp (size, times, inode) of each data file before key_of() hashes the files, and
  // compares it after the rows are written. So the hash in the cache entry's key and the rows belong to the same file
  // contents.
  UnchangedFiles files(paths_of(sources));
  const int64_t padding = padding_token(tokenizer, options.vocab_size);
  const std::string key = options.cache_folder.empty() ? "none" : key_of(options, sources, cache, padding);
  auto dated_template = chat_template;
  if (chat_template) dated_template = chat_template->at_time(kTimeOfTemplates);
  const SampleMaker maker(
      tokenizer, dated_template,
      {.vocab_size = options.vocab_size, .train_on_inputs = options.train_on_inputs, .end_tokens = options.end_tokens});
  bool made = false;
  const auto make = [&](const std::filesystem::path& folder) {
    made = true;
    write_rows(options, sources, key, padding, maker, folder);
    files.check();
  };
  auto rows = cache.open_or_make(key, make, options.stop);
  TESSERA_CHECK(rows->sequence_length() == options.sequence_length, ErrorKind::kFormat,
                "[data.cache] {}: found rows of {} tokens, wanted {}. Remove the folder.",
                (options.cache_folder / key).string(), rows->sequence_length(), options.sequence_length);
  // With `quiet`, only the log line with the number of rows and the time is written, and only if this call made the
  // rows and they are kept in the cache.
  if (options.quiet && (!made || options.cache_folder.empty())) return {rows, std::move(files)};
  if (!options.quiet && chat_template && chat_template->reads_clock()) {
    log_info("[data.load] {} prints the date: in training data it is always 26 July 2024", chat_template->name());
  }
  constexpr size_t kShown = 4;
  const size_t shown = options.quiet ? 0 : rows->description().size();
  for (size_t i = 0; i < std::min(kShown, shown); ++i) log_info("[data.load] {}", rows->description()[i]);
  if (shown > kShown) log_info("[data.load] and {} more files", shown - kShown);
  log_info("[data.load] {} rows of {} tokens, {} in {:.1f} s{}", rows->rows(), rows->sequence_length(),
           made ? "tokenized" : "found tokenized", seconds_since(start),
           options.cache_folder.empty() ? "" : ", kept as " + (options.cache_folder / key).string());
  return {rows, std::move(files)};
}

}  // namespace tessera::data
