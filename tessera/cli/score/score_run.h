// Computes log-probs of many sequences with a model in any parallel layout.
//
//   ScoreRun run(*model, run_mesh, stages, /*batch_tokens=*/4096);
//   const auto logprobs = run.score(sequences).logprobs;                   // COLLECTIVE over the world
//
// Sequences of similar length form a batch; the batches do not depend on the layout. Data parallel ranks compute
// different batches; ranks of one pp, cp or tp group compute the same batch together. A ScoreRun belongs to one rank.
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
  size_t sequence = 0;  // index in the sequences that were passed
  size_t token = 0;     // index in the sequence
  double value = 0;
};

class ScoreRun {
 public:
  // `stages`: pipeline stages of the model; without a mesh the model is one stage. `batch_tokens`: the most tokens of
  // one forward pass on a rank, including padding; a longer sequence is a batch of its own.
  ScoreRun(CausalLM& model, const train::RunMesh& run_mesh, const pipeline::PipelineOptions& stages,
           int64_t batch_tokens);
  struct Scores {
    std::vector<std::vector<double>> logprobs;  // on rank 0: of the scored tokens of each sequence; else empty
    std::optional<WrongLogProb> wrong{};        // the first one, the same on all ranks
  };
  // Computes the log-probs of the scored tokens of all sequences. `sequences` must be the same on all ranks. COLLECTIVE
  // over the world.
  Scores score(const std::vector<const ScoreSequence*>& sequences);

 private:
  using Batch = std::vector<size_t>;  // indices of sequences
  std::vector<Batch> batches_of(const std::vector<const ScoreSequence*>& sequences) const;
  std::vector<double> forward(const std::vector<const ScoreSequence*>& sequences, const Batch& batch);

  at::Tensor logprobs(const at::Tensor& tokens, const at::Tensor& targets);
  CausalLM& model_;
  const train::RunMesh& run_mesh_;
  pipeline::Pipeline pipeline_;
  int64_t batch_tokens_;
};

}  // namespace tessera::cli
