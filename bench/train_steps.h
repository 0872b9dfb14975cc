// Code of all benchmarks of training steps: our ranks, which answer requests for steps, and the comparison with a peer
// that trains on the same tokens with the same settings.
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

// Returns the names of the kernels that this rank launched since the last call. Null: launches are not counted.
using KernelNames = std::function<std::vector<std::string>()>;

// The rows of one rank's step: tokens are consecutive values of (7919 * index) modulo the vocabulary.
struct StepRows {
  int64_t rows = 0;  // number of rows of this rank
  int64_t length = 0;
  int64_t document = 0;                   // tokens of each document of a row; 0: a row is one document
  bool early = false;                     // updates in backward, no clipping
  int64_t data_ranks = 1, data_rank = 0;  // the ranks with different rows, and this rank's number among them
  bool is_counted = true;                 // train::StepOptions::is_counted
  int64_t micro_batches = 1;              // micro-batches of this rank's rows
  std::function<data::Batch(const data::Batch&)> own = {};  // selects this rank's tokens; null: all tokens
  pipeline::PipelineOptions pipeline = {};
  KernelNames kernels = {};
};

// Trains with AdamW and gradient clipping at 1.0. Reads lines {"steps": N} on rank 0's stdin until {"steps": 0} or the
// end of the input, and answers each with {"seconds", "loss", "peak_bytes": [one per rank]}. With rows.kernels the
// answer also has "launches" (of rank 0, per step) and "kernels": {name: launches in all steps}. COLLECTIVE over the
// world.
void serve_steps(CausalLM& model, comm::World& world, const StepRows& rows);

struct LayoutRank {
  std::string model;  // folder
  int64_t rows = 0;   // number of rows of all ranks
  int64_t length = 0;
  // Sizes of mesh dims such as "tp2-pp2", with "sp" for sequence parallelism and "graphs" for layers as device graphs;
  // the dp_shard dim gets the remaining ranks. Or the name of a pipeline schedule over all ranks.
  std::string how;
  int64_t micro_batches = 1;  // micro-batches of all ranks
  std::string device = "cpu";
  KernelNames kernels = {};
};
// Parses `--rank MODEL ROWS LENGTH HOW [MICRO_BATCHES]`. Returns nullopt for other arguments.
std::optional<LayoutRank> rank_asked_for(int argc, char** argv);
// Runs one of our ranks, started by `tessera launch`: makes the model in this layout and calls serve_steps. Returns the
// exit code. COLLECTIVE over the world.
int serve_layout(const LayoutRank& given);

// Answers each line on stdin with {"rate": GFLOP/s}: the highest rate of a large matrix product on all cores, measured
// in several ways.
void serve_peak(const std::string& dtype);

// Writes a Hugging Face folder with this config and random weights. Returns its path.
std::string write_random_model(const std::filesystem::path& dir, const std::string& config);

// Returns the command line that runs `self --rank WORDS` on `ranks` local ranks.
std::vector<std::string> launched(const std::string& self, int ranks, const std::vector<std::string>& words);

struct StepCase {
  std::string name;
  std::string peer;                // script in bench/peers
  std::vector<std::string> words;  // arguments of our ranks after --rank: model folder, rows, length, ...; the peer
                                   // gets the number of ranks as its second argument
  std::vector<std::string> peer_words = {};  // arguments of the peer; empty: `words`
  int64_t steps = 0;                         // steps per request
  int64_t tokens = 0;                        // tokens per step, of all ranks
  double memory_at_most = 1;                 // largest accepted peak memory, relative to the peer's
  int ranks = kTrainingRanks;
  double faster_at_least = 1;     // smallest accepted tokens/s, relative to the peer's
  double peak_share = -1;         // smallest accepted share of the peak rate of products; 0: no limit; -1: not measured
  std::string dtype = "float32";  // dtype of these products
  double loss_within = 1e-3;      // largest relative difference from the peer's loss
  int64_t document = 0;           // tokens of each document of a row; 0: a row is one document
  bool only_adapters = false;     // weights have no gradients
  bool compiled = false;          // also compares with the peer under torch.compile and tcmalloc
};
// Measures tokens/s, peak memory per rank, and the rate of a step's matrix products. The rate is compared with that of
// a large product in the same run. Counted are the products with weights and those of attention, half of them for
// causal attention, and no recomputed products. `self` is the program of our ranks. The losses of ours and the peer
// must agree.
void measure_steps(Harness& harness, const std::string& self, const StepCase& given);

}  // namespace tessera::bench
