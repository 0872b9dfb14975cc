// Attention over a sequence that is sharded over the ranks of a group (context parallelism).
//
//   const ContextParallelGroup context_parallel{.group = mesh->group("cp"), .rotate = RotateMethod::kAllToAll};
//   // COLLECTIVE:
//   const auto sequence = context_sequence(context_parallel, {.rows = B, .tokens = own, .document_ids = ids});
//   const auto pattern = attention_pattern({.rows = B, .tokens = own, .context = sequence}, x.options());
//   at::Tensor y = attend(q, k, v, pattern);                          // of this rank's tokens: [B, H, own, d]
//
// Each rank keeps its queries and gets keys and values from the ranks that hold them. kAllGather gets all keys with one
// all-gather per call. kAllToAll ("ring") works in steps: at step i, rank r receives keys of rank r - i (modulo the
// number of ranks), only those that its queries see, while it computes step i - 1. The backward pass receives the keys
// again instead of saving them, and sends their gradients back to the owners, with one reduce-scatter (kAllGather) or
// step by step (kAllToAll).
//
// Scores of keys that a query does not see (later tokens, other documents, outside the window) are mostly not computed;
// where the window's border crosses a piece, a mask of at most masked_queries() rows excludes them. Sums are in float32
// (float64 for float64), in an order that depends only on the layout. See docs/design/context_parallel.md.
//
// The objects are made once per forward and shared by all layers with the same sliding window. Ranks that run as
// threads of one process must not share them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/kernels/attention/context_layout.h"
#include "tessera/nn/attention/context_pieces.h"

namespace tessera::nn {

struct AttentionScoreOptions;

enum class RotateMethod : uint8_t { kAllGather, kAllToAll };
// Returns the RotateMethod for the name "allgather" or "alltoall". Error kConfig for another name.
RotateMethod rotate_method_of(std::string_view name);

struct ContextParallelGroup {
  std::shared_ptr<comm::Group> group;
  RotateMethod rotate = RotateMethod::kAllGather;
};

// The sequence of one forward: its layout over ranks, and the documents of its rows.
struct ContextSequence {
  ContextParallelGroup context_parallel;
  kernels::ContextLayout layout;
  std::vector<RowDocuments> documents;
  int64_t rows = 1;

  at::Tensor positions() const {
    return layout.positions(context_parallel.group->rank());
  }  // global, of this rank's tokens, int64
};

struct ContextSequenceOptions {
  int64_t rows = 1;
  int64_t tokens = 0;         // of each row on this rank
  at::Tensor document_ids{};  // int64 [rows, tokens] of this rank's tokens, as in attention_pattern
};

// Collects the number of tokens of every rank, which must fit a kernels::ContextLayout, and the documents of the
// unsharded rows. COLLECTIVE over context_parallel.group: one all-gather of a few numbers, and with document ids an
// all-gather of the ids. Error kShape on all ranks: different numbers of rows, tokens that do not fit the layout, ids
// on some ranks only, or an id that occurs in two separate runs.
std::shared_ptr<const ContextSequence> context_sequence(const ContextParallelGroup& context_parallel,
                                                        const ContextSequenceOptions& sequence_options);

// The computation of one rank and the keys that it receives and sends.
struct ContextPattern {
  struct RotationStep {
    std::vector<ContextPiece> pieces;     // of this rank's queries and the keys of the step
    int64_t keys = 0;                     // number of keys of the step
    std::vector<TokenRange> sent_ranges;  // kAllToAll: this rank's tokens whose keys are sent at the step
    int64_t sent_keys() const;
  };
  std::shared_ptr<const ContextSequence> sequence;
  // kAllGather: one step, with all keys in the order of the sequence. kAllToAll: at step i, rank r receives keys of
  // rank r - i and sends keys to rank r + i (modulo the number of ranks).
  std::vector<RotationStep> steps;
  at::Tensor mask;          // of masked pieces, [masked_queries(), distances]
  int64_t mask_origin = 0;  // the column of the key at the first query's own position
};

// Makes the ContextPattern of this rank. `options` has the dtype and device of the queries; ContextPattern::mask gets
// them. No communication.
std::shared_ptr<const ContextPattern> context_pattern(std::shared_ptr<const ContextSequence> sequence,
                                                      const ContextPieceOptions& pieces,
                                                      const at::TensorOptions& options);

// Returns the attention of this rank's queries to the keys that `pattern` describes, in the shape of q. q [B, H, T, d],
// k and v [B, G, T, d] are of this rank's T tokens: plain tensors, or DTensors that shard only rows and heads. The
// forward and the backward pass are COLLECTIVE over the context-parallel group. There is no second derivative. Error
// kShape: sizes other than the rows and tokens of pattern->sequence, or DTensors with other placements.
at::Tensor attend_context(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::shared_ptr<const ContextPattern>& pattern, const AttentionScoreOptions& scores);

}  // namespace tessera::nn
