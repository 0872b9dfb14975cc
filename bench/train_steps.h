// Shared code of the benchmarks of training steps: our ranks, which answer requests to run steps, and the comparison
// with a peer that trains on the same tokens with the same settings.
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

// Batches and options of the steps of one rank. Tokens are consecutive values of (7919 * index) modulo the vocabulary
// size.
struct StepRows {
  int64_t rows = 0;  // number of rows of this rank
  int64_t length = 0;
  int64_t document_length = 0;            // tokens of each document of a packed row; 0: a row is one document
  bool optimizer_in_backward = false;     // also disables clipping, which it excludes
  int64_t data_ranks = 1, data_rank = 0;  // number of ranks with different rows; index of this rank among them
  bool is_counted = true;                 // train::StepOptions::is_counted
  int64_t micro_batches = 1;              // micro-batches of this rank's rows
  std::function<data::Batch(const data::Batch&)> local_tokens = {};  // selects this rank's tokens; null: all tokens
  pipeline::PipelineOptions pipeline = {};
  KernelNames kernel_names = {};
};

// Trains with AdamW and gradient clipping at 1.0. Reads lines {"steps": N} on rank 0's stdin until {"steps": 0} or the
// end of the input, and answers each with {"seconds", "loss", "peak_bytes": [one per rank]}. With
// rows.kernel_names the answer also has "launches" (of rank 0, per step) and "kernels": {name: launches in all steps}.
// COLLECTIVE over the world.
void serve_steps(CausalLM& model, comm::World& world, const StepRows& rows);

struct LayoutRank {
  std::string model;  // folder
  int64_t rows = 0;   // number of rows of all ranks
  int64_t length = 0;
  // Sizes of mesh dims such as "tp2-pp2": dp (dp_shard), rp (dp_replicate), tp, cp, pp and ep. "sp" adds sequence
  // parallelism, and "graphs" captures each layer as a device graph. dp_shard gets the remaining ranks. Alternatively
  // the name of a pipeline schedule, with one pipeline over all ranks.
  std::string layout;
  int64_t micro_batches = 1;  // micro-batches of all ranks
  std::string device = "cpu";
  KernelNames kernel_names = {};
};
// Parses `--rank MODEL ROWS LENGTH LAYOUT [MICRO_BATCHES]`. Returns nullopt for other arguments.
std::optional<LayoutRank> parse_layout_rank(int argc, char** argv);
// Runs one of our ranks, started by `tessera launch`: makes the model in this layout and calls serve_steps. Returns the
// exit code. COLLECTIVE over the world.
int serve_layout(const LayoutRank& options);

// Answers each line on stdin with {"rate": GFLOP/s}: the peak rate of a large GEMM on all cores. It is the highest rate
// of several functions that compute it.
void serve_gemm_peak(const std::string& dtype);

// Writes a Hugging Face folder with this config and random weights. Returns its path.
std::string write_random_model(const std::filesystem::path& dir, const std::string& config);

// Returns the command line that runs `self --rank ARGUMENTS` on `ranks` local ranks.
std::vector<std::string> launch_command(const std::string& self, int ranks, const std::vector<std::string>& arguments);

struct StepCase {
  std::string name;
  std::string peer;  // script in bench/peers
  // Arguments of our ranks after --rank: model folder, rows, length, ...
  std::vector<std::string> arguments;
  // Arguments of the peer; empty: `arguments`. The number of ranks is inserted as the second argument.
  std::vector<std::string> peer_arguments = {};
  int64_t steps = 0;            // steps per request
  int64_t tokens = 0;           // tokens per step, of all ranks
  double max_memory_ratio = 1;  // largest accepted peak memory, relative to the peer's
  int ranks = kTrainingRanks;
  double min_speedup = 1;             // smallest accepted tokens/s, relative to the peer's
  double min_gemm_share = -1;         // smallest accepted share of the peak GEMM rate; 0: no limit; -1: not measured
  std::string dtype = "float32";      // dtype of the GEMM whose peak rate is measured
  double loss_tolerance = 1e-3;       // largest relative difference from the peer's loss
  int64_t document_length = 0;        // tokens of each document of a packed row; 0: a row is one document
  bool only_adapters = false;         // base weights are frozen
  bool compare_with_compile = false;  // also compares with the peer under torch.compile and tcmalloc
};
// Measures tokens/s, peak memory per rank, and the rate of a step's matrix products in FLOP/s. The rate is compared
// with the peak GEMM rate, which is measured in the same run. The FLOPs are those of the products with weights and of
// attention. Causal attention counts half, and recomputed products do not count. `self` is the program of our ranks.
// Our loss and the peer's must agree.
void measure_steps(Harness& harness, const std::string& self, const StepCase& step_case);

}  // namespace tessera::bench
