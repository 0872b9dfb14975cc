// What the benchmarks of training steps share: our ranks, which answer requests for steps, and the comparison with a
// peer that trains on the same tokens with the same settings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/data/rows/batch.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/parallel/pipeline/pipeline.h"

namespace tessera::bench {

constexpr int kTrainingRanks = 2;

// What this rank's device was given to do since the last call; none: nobody counts.
using KernelNames = std::function<std::vector<std::string>()>;

// The rows of one rank's step: tokens are consecutive values of (7919 * index) modulo the vocabulary.
struct StepRows {
  int64_t rows = 0;  // of this rank
  int64_t length = 0;
  int64_t document = 0;                                     // tokens of each document of a row; 0: it is one
  bool early = false;                                       // updates in backward, no clipping
  int64_t data_ranks = 1, data_rank = 0;                    // those that have rows of their own
  bool is_counted = true;                                   // train::StepOptions::is_counted
  int64_t micro_batches = 1;                                // that the rows of this rank are cut into
  std::function<data::Batch(const data::Batch&)> own = {};  // the tokens of this rank; none: all
  pipeline::PipelineOptions pipeline = {};
  KernelNames kernels = {};
};

// Trains with AdamW, clipping at 1.0: reads {"steps": N} a line on rank 0's stdin, answers {"seconds", "loss",
// "peak_bytes": [a rank]}, with rows.kernels also "launches" of a step of rank 0 and "kernels": {name: times in all
// steps}, until {"steps": 0} or the end of the input. COLLECTIVE over the world.
void serve_steps(CausalLM& model, comm::World& world, const StepRows& rows);

struct LayoutRank {
  std::string model;  // folder
  int64_t rows = 0;   // of all ranks
  int64_t length = 0;
  // Sizes of mesh dims as "tp2-pp2", with "sp" for sequence parallelism and "graphs" for graphs of layers, what is left
  // of the ranks sharding data; or a pipeline schedule over all ranks.
  std::string how;
  int64_t micro_batches = 1;  // of all ranks
  std::string device = "cpu";
  KernelNames kernels = {};
};
// What `--rank MODEL ROWS LENGTH HOW [MICRO_BATCHES]` asks for; none: something else was asked for.
std::optional<LayoutRank> rank_asked_for(int argc, char** argv);
// One of our ranks, started by `tessera launch`: serve_steps of a model that lies so. Its exit code. COLLECTIVE.
int serve_layout(const LayoutRank& given);

// Answers each line on stdin with {"rate": the most GFLOP/s of a large product on all cores}, by whatever way is
// fastest.
void serve_peak(const std::string& dtype);

// A Hugging Face folder of this config with random weights; its path.
std::string write_random_model(const std::filesystem::path& dir, const std::string& config);

// The command line of our ranks: `self --rank WORDS` by each of so many local processes.
std::vector<std::string> launched(const std::string& self, int ranks, const std::vector<std::string>& words);

struct StepCase {
  std::string name;
  std::string peer;                // script in bench/peers
  std::vector<std::string> words;  // model folder, rows, length, ...: of our ranks behind --rank; the peer's second
                                   // word is the number of ranks
  std::vector<std::string> peer_words = {};  // where they differ from ours
  int64_t steps = 0;                         // of a request
  int64_t tokens = 0;                        // of a step, of all ranks
  double memory_at_most = 1;                 // wanted, in shares of the peer's
  int ranks = kTrainingRanks;
  double faster_at_least = 1;     // wanted: tokens/s in multiples of the peer's
  double peak_share = -1;         // wanted of what products alone reach on all cores; 0: told only; -1: not measured
  std::string dtype = "float32";  // of those products
  double loss_within = 1e-3;      // of the peer's, relative
  int64_t document = 0;           // tokens of each document of a row; 0: it is one
  bool only_adapters = false;     // weights have no gradients
  bool compiled = false;          // also beside the peer under torch.compile, with the allocator that ours links
};
// tokens/s, peak memory a rank, and the rate of a step's matrix products beside what a large one reaches in the same
// run; `self` is the program of our ranks. Products are those with weights and attention's, of a causal one half,
// without what is computed again. The losses of both halves must agree.
void measure_steps(Harness& harness, const std::string& self, const StepCase& given);

}  // namespace tessera::bench
