// Log-probs of many sequences by a model in any layout.
//
//   ScoreRun run(*model, place, stages, /*batch_tokens=*/4096);
//   const auto logprobs = run.score(sequences).logprobs;                   // COLLECTIVE over the world
//
// Sequences of like length are read together; which ones does not depend on the layout. The ranks that differ in their
// dp coordinates alone share the batches, the others read the same. Belongs to one rank.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/cli/score/score_records.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/parallel/pipeline/pipeline.h"
#include "tessera/train/run/run_mesh.h"

namespace tessera::cli {

// A log-prob that is NaN or infinite.
struct WrongLogProb {
  size_t sequence = 0;  // of those that were passed
  size_t token = 0;     // of the sequence
  double value = 0;
};

class ScoreRun {
 public:
  // stages: of the model; without a mesh it is whole. batch_tokens: of one forward pass on a rank, padding included; a
  // longer sequence goes alone.
  ScoreRun(CausalLM& model, const train::RunMesh& place, const pipeline::PipelineOptions& stages, int64_t batch_tokens);
  struct Scores {
    std::vector<std::vector<double>> logprobs;  // of each sequence's scored tokens; empty on ranks but the first
    std::optional<WrongLogProb> wrong{};        // the first one, alike on all ranks
  };
  // All ranks pass the same sequences. COLLECTIVE over the world.
  Scores score(const std::vector<const ScoreSequence*>& sequences);

 private:
  using Batch = std::vector<size_t>;  // numbers of sequences
  std::vector<Batch> batches_of(const std::vector<const ScoreSequence*>& sequences) const;
  std::vector<double> forward(const std::vector<const ScoreSequence*>& sequences, const Batch& batch);

  at::Tensor logprobs(const at::Tensor& tokens, const at::Tensor& targets);
  CausalLM& model_;
  const train::RunMesh& place_;
  pipeline::Pipeline pipeline_;
  int64_t batch_tokens_;
};

}  // namespace tessera::cli
