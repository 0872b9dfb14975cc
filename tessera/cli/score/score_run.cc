#include "tessera/cli/score/score_run.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "tessera/base/error.h"
#include "tessera/base/files/copy_bytes.h"
#include "tessera/base/ignored_label.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/kernels/attention/context_layout.h"

namespace tessera::cli {

ScoreRun::ScoreRun(CausalLM& model, const train::RunMesh& run_mesh, const pipeline::PipelineOptions& stages,
                   int64_t batch_tokens)
    : model_(model), run_mesh_(run_mesh), pipeline_(model, stages), batch_tokens_(batch_tokens) {}

// Sorts the sequences by length and fills batches in this order, so that a batch has little padding. The longest come
// first: the peak of memory is then reached in the first batch, and not after hours.
std::vector<ScoreRun::Batch> ScoreRun::batches_of(const std::vector<const ScoreSequence*>& sequences) const {
  std::vector<size_t> order;
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i]->scored() > 0) order.push_back(i);
  }
  std::ranges::stable_sort(
      order, [&](size_t a, size_t b) { return sequences[a]->tokens.size() > sequences[b]->tokens.size(); });
  std::vector<Batch> batches;
  for (const size_t i : order) {
    // The first sequence of a batch is its longest, and all rows are padded to its length.
    const auto fits = [&] {
      const auto length = static_cast<int64_t>(sequences[batches.back().front()]->tokens.size());
      return static_cast<int64_t>(batches.back().size() + 1) * length <= batch_tokens_;
    };
    if (batches.empty() || !fits()) batches.emplace_back();
    batches.back().push_back(i);
  }
  return batches;
}

// Log-probs of `targets`, of the shape of `tokens` [rows, length]. Defined on the ranks of the last pipeline stage
// only. With cp, each rank computes its shard of the tokens and the results are gathered. COLLECTIVE over the ranks
// that read these rows.
at::Tensor ScoreRun::logprobs(const at::Tensor& tokens, const at::Tensor& targets) {
  const auto& mesh = *run_mesh_.mesh();
  const int64_t dim = mesh.dim_of("cp"), rank = mesh.local_rank(dim), length = tokens.size(1);
  if (mesh.size(dim) == 1) return pipeline_.logprobs({.tokens = tokens}, targets);
  const kernels::ContextLayout layout(length, mesh.size(dim));
  const auto own = [&](const at::Tensor& whole) { return layout.shard(whole, 1, rank); };
  const auto positions = at::arange(length, tokens.options()).expand_as(tokens);
  const auto found = pipeline_.logprobs({.tokens = own(tokens), .positions = own(positions)}, own(targets));
  return found.defined() ? layout.unshard(mesh.group(dim), found, 1) : found;
}

// Log-probs of the scored tokens of a batch, one sequence after the other; empty on ranks without the last stage. Rows
// are padded to the longest sequence. targets[i] is the token after tokens[i]; targets of padding and of tokens that
// are not scored are ignored labels.
std::vector<double> ScoreRun::forward(const std::vector<const ScoreSequence*>& sequences, const Batch& batch) {
  const auto rows = static_cast<int64_t>(std::max<size_t>(batch.size(), 1));
  // The last token of a sequence is only a target, so rows are one shorter than sequences. Each rank of a cp group
  // needs at least one token.
  const int64_t context_ranks = run_mesh_.mesh()->size(run_mesh_.mesh()->dim_of("cp"));
  const int64_t longest = batch.empty() ? 1 : static_cast<int64_t>(sequences[batch.front()]->tokens.size()) - 1;
  const int64_t length = std::max(longest, context_ranks);
  const auto tokens = at::zeros({rows, length}, at::kLong), targets = at::full_like(tokens, kIgnoredLabel);
  auto* token = tokens.mutable_data_ptr<int64_t>();
  auto* target = targets.mutable_data_ptr<int64_t>();
  for (const size_t i : batch) {
    const auto& sequence = *sequences[i];
    std::copy(sequence.tokens.begin(), sequence.tokens.end() - 1, token);
    std::copy(sequence.tokens.begin() + static_cast<int64_t>(sequence.first), sequence.tokens.end(),
              target + sequence.first - 1);
    token += length;
    target += length;
  }
  const auto device = run_mesh_.mesh()->device();
  const auto all = logprobs(tokens.to(device), targets.to(device));
  if (!all.defined()) return {};
  const auto found = all.to(at::kCPU, at::kDouble).contiguous();
  std::vector<double> values;
  const double* row = found.const_data_ptr<double>();
  for (const size_t i : batch) {
    const auto& sequence = *sequences[i];
    values.insert(values.end(), row + sequence.first - 1, row + sequence.tokens.size() - 1);
    row += length;
  }
  return values;
}

// Round r computes the batches r * data_ranks to r * data_ranks + data_ranks - 1, one per data parallel rank. Several
// ranks have the log-probs of a batch; one of these ranks sends them in an all-gather of all ranks. Every rank checks
// the log-probs of all batches, so that all ranks agree on the first one that is not finite. Only rank 0 keeps the
// log-probs.
ScoreRun::Scores ScoreRun::score(const std::vector<const ScoreSequence*>& sequences) {
  const c10::NoGradGuard no_grad;
  model_.train(false);
  const auto batches = batches_of(sequences);
  auto& group = run_mesh_.world_group();
  const auto data_ranks = static_cast<size_t>(run_mesh_.data_size()), own = static_cast<size_t>(run_mesh_.data_rank());
  const auto& mesh = *run_mesh_.mesh();
  const bool sends_results =
      run_mesh_.is_counted() && mesh.local_rank(mesh.dim_of("cp")) == 0 && pipeline_.has_last_stage();
  // For each rank, as text: the data parallel rank whose log-probs this rank sends in the all-gather of each round;
  // empty if it sends none.
  const auto data_rank_of_sender = comm::all_gather_bytes(group, sends_results ? std::to_string(own) : "");
  Scores out{.logprobs = std::vector<std::vector<double>>(run_mesh_.is_rank_zero() ? sequences.size() : 0)};
  const auto keep = [&](size_t number, const double* values) {
    if (number >= batches.size()) return;
    for (const size_t i : batches[number]) {
      const std::span<const double> own(values, sequences[i]->scored());
      const auto wrong = std::ranges::find_if_not(own, [](double each) { return std::isfinite(each); });
      if (wrong != own.end() && (!out.wrong || i < out.wrong->sequence)) {
        out.wrong = {i, sequences[i]->first + static_cast<size_t>(wrong - own.begin()), *wrong};
      }
      if (!out.logprobs.empty()) out.logprobs[i].assign(own.begin(), own.end());
      values += own.size();
    }
  };
  for (size_t first = 0; first < batches.size(); first += data_ranks) {
    // A rank without a batch in the last round computes an empty one, to join the collectives of other ranks.
    const auto values = forward(sequences, first + own < batches.size() ? batches[first + own] : Batch{});
    const std::string_view bytes(reinterpret_cast<const char*>(values.data()),
                                 sends_results ? values.size() * sizeof(double) : 0);
    const auto all = comm::all_gather_bytes(group, bytes);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (data_rank_of_sender[rank].empty()) continue;
      std::vector<double> theirs(all[rank].size() / sizeof(double));
      copy_bytes(theirs.data(), all[rank].data(), all[rank].size());
      keep(first + std::stoull(data_rank_of_sender[rank]), theirs.data());
    }
  }
  return out;
}

}  // namespace tessera::cli
