#include "tessera/cli/score_run.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/kernels/ignored_label.h"

namespace tessera::cli {

ScoreRun::ScoreRun(CausalLM& model, std::shared_ptr<comm::World> world, const ScoreRunOptions& options)
    : model_(model), world_(std::move(world)), options_(options) {
  TESSERA_CHECK(options.tensor_parallel >= 1 && world_->size() % options.tensor_parallel == 0, ErrorKind::kInternal,
                "[score] {} ranks are no multiple of tp {}", world_->size(), options.tensor_parallel);
}

// The longest first, so that what is read together is of like length and memory is at its peak at once.
std::vector<ScoreRun::Batch> ScoreRun::batches_of(const std::vector<const ScoreSequence*>& sequences) const {
  std::vector<size_t> order;
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i]->scored() > 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return sequences[a]->tokens.size() > sequences[b]->tokens.size(); });
  std::vector<Batch> batches;
  for (const size_t i : order) {
    const auto fits = [&] {
      const auto length = static_cast<int64_t>(sequences[batches.back().front()]->tokens.size());
      return static_cast<int64_t>(batches.back().size() + 1) * length <= options_.batch_tokens;
    };
    if (batches.empty() || !fits()) batches.emplace_back();
    batches.back().push_back(i);
  }
  return batches;
}

std::vector<double> ScoreRun::forward(const std::vector<const ScoreSequence*>& sequences, const Batch& batch) {
  const auto rows = static_cast<int64_t>(std::max<size_t>(batch.size(), 1));
  // The last token of a row is read by nobody.
  const int64_t length = batch.empty() ? 1 : static_cast<int64_t>(sequences[batch.front()]->tokens.size()) - 1;
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
  const auto found = model_.logprobs({.tokens = tokens}, targets).to(at::kCPU, at::kDouble).contiguous();
  std::vector<double> values;
  const double* row = found.const_data_ptr<double>();
  for (const size_t i : batch) {
    const auto& sequence = *sequences[i];
    values.insert(values.end(), row + sequence.first - 1, row + sequence.tokens.size() - 1);
    row += length;
  }
  return values;
}

std::vector<std::vector<double>> ScoreRun::score(const std::vector<const ScoreSequence*>& sequences) {
  const c10::NoGradGuard no_grad;
  model_.train(false);
  const auto batches = batches_of(sequences);
  const auto sharers = static_cast<size_t>(world_->size() / options_.tensor_parallel);
  const auto own = static_cast<size_t>(world_->rank() / options_.tensor_parallel);
  const bool speaks = world_->rank() % options_.tensor_parallel == 0;
  std::vector<std::vector<double>> out(world_->rank() == 0 ? sequences.size() : 0);
  const auto keep = [&](size_t number, const double* values) {
    if (number >= batches.size() || out.empty()) return;
    for (const size_t i : batches[number]) {
      out[i].assign(values, values + sequences[i]->scored());
      values += sequences[i]->scored();
    }
  };
  for (size_t first = 0; first < batches.size(); first += sharers) {
    // Who has no batch left takes part in the collectives of the others.
    const auto values = forward(sequences, first + own < batches.size() ? batches[first + own] : Batch{});
    if (world_->size() == 1) {
      keep(first, values.data());
      continue;
    }
    const std::string_view bytes(reinterpret_cast<const char*>(values.data()),
                                 speaks ? values.size() * sizeof(double) : 0);
    const auto all = comm::all_gather_bytes(*world_->group(), bytes);
    for (size_t sharer = 0; sharer < sharers; ++sharer) {
      const auto& from = all[sharer * static_cast<size_t>(options_.tensor_parallel)];
      std::vector<double> theirs(from.size() / sizeof(double));
      std::memcpy(theirs.data(), from.data(), from.size());
      keep(first + sharer, theirs.data());
    }
  }
  return out;
}

}  // namespace tessera::cli
