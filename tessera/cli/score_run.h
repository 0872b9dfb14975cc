// Log-probs of many sequences by a model in any layout.
//
//   ScoreRun run(*model, world, {.tensor_parallel = 2, .batch_tokens = 4096});
//   std::vector<std::vector<double>> logprobs = run.score(sequences);      // COLLECTIVE over the world
//
// Sequences of like length are read together; which ones does not depend on the layout. Ranks of one tensor-parallel
// group read the same batch, the others share the batches. Belongs to one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/cli/score_records.h"
#include "tessera/models/causal_lm.h"

namespace tessera::comm {
class World;
}

namespace tessera::cli {

struct ScoreRunOptions {
  int64_t tensor_parallel = 1;  // ranks next to one another that read the same tokens
  int64_t batch_tokens = 4096;  // of one forward pass on a rank, padding included; a longer sequence goes alone
};

class ScoreRun {
 public:
  ScoreRun(CausalLM& model, std::shared_ptr<comm::World> world, const ScoreRunOptions& options);
  // Of each sequence the log-probs of its scored tokens; on rank 0, elsewhere empty. All ranks pass the same sequences.
  std::vector<std::vector<double>> score(const std::vector<const ScoreSequence*>& sequences);

 private:
  using Batch = std::vector<size_t>;  // numbers of sequences
  std::vector<Batch> batches_of(const std::vector<const ScoreSequence*>& sequences) const;
  std::vector<double> forward(const std::vector<const ScoreSequence*>& sequences, const Batch& batch);

  CausalLM& model_;
  std::shared_ptr<comm::World> world_;
  ScoreRunOptions options_;
};

}  // namespace tessera::cli
