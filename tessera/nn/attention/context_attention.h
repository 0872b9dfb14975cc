// Attention where the tokens of a sequence lie over the ranks of a group (context parallelism).
//
//   const ContextParallelism how{.group = mesh->group("cp"), .rotate = RotateMethod::kAllToAll};
//   const auto sequence = context_sequence(how, {.rows = B, .tokens = own, .document_ids = ids});     // COLLECTIVE
//   const auto pattern = attention_pattern({.rows = B, .tokens = own, .context = sequence}, x.options());
//   at::Tensor y = attend(q, k, v, pattern);                          // of this rank's tokens: [B, H, own, d]
//
// Each rank keeps its queries; keys and values come from the ranks that have them. kAllGather brings all of them at
// once (one all-gather a call); kAllToAll ("ring") in steps, at step i from the rank i before, while the step before is
// computed, and only those that this rank's queries see. The backward pass brings them again instead of keeping them,
// and their gradients go home: one reduce-scatter, or step by step. What no query sees (a later token, another
// document, outside the window) is not computed, and no mask has more than masked_queries() rows. Sums run in float32
// (float64 of float64) and in an order that depends on the layout alone. docs/design/context_parallel.md.
//
// Values made once a forward, shared by all layers that see alike; they belong to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/kernels/attention/context_layout.h"
#include "tessera/nn/attention/context_pieces.h"

namespace tessera::nn {

struct AttentionScores;

enum class RotateMethod : uint8_t { kAllGather, kAllToAll };
// "allgather" or "alltoall"; Error kConfig for another name.
RotateMethod rotate_method_of(std::string_view name);

struct ContextParallelism {
  std::shared_ptr<comm::Group> group;
  RotateMethod rotate = RotateMethod::kAllGather;
};

// The sequence of one forward: how it lies, and the documents of its rows.
struct ContextSequence {
  ContextParallelism how;
  kernels::ContextLayout layout;
  std::vector<RowDocuments> documents;
  int64_t rows = 1;

  at::Tensor positions() const { return layout.positions(how.group->rank()); }  // of this rank's tokens, int64
};

struct ContextSequenceOptions {
  int64_t rows = 1;
  int64_t tokens = 0;         // of each row on this rank
  at::Tensor document_ids{};  // int64 [rows, tokens] of this rank's tokens, as attention_pattern's
};

// Learns how many tokens the ranks have, which must be as kernels::ContextLayout cuts them, and the documents of the
// whole rows. COLLECTIVE over how.group: one gather of a few numbers, with document ids another of these. Error kShape
// on all ranks: another number of rows on one, tokens that lie otherwise, ids on some ranks only, a document in two
// pieces.
std::shared_ptr<const ContextSequence> context_sequence(const ContextParallelism& how,
                                                        const ContextSequenceOptions& wanted);

// What a rank computes, and what it gets and gives for that.
struct ContextPattern {
  struct Step {
    std::vector<ContextPiece> pieces;  // of this rank's queries and the keys that the step brings
    int64_t keys = 0;                  // that it brings
    std::vector<TokenRange> given;     // kAllToAll: this rank's tokens whose keys another sees
    int64_t keys_given() const;
  };
  std::shared_ptr<const ContextSequence> sequence;
  std::vector<Step> steps;  // kAllGather: one, keys in the order of the sequence. kAllToAll: step i brings the keys of
                            // the rank i before, and gives to the rank i behind
  at::Tensor mask;          // of masked pieces, [masked_queries(), distances]
  int64_t mask_origin = 0;  // the column of the key that is the first query's own token
};

// `options` tells dtype and device of the queries. No communication.
std::shared_ptr<const ContextPattern> context_pattern(std::shared_ptr<const ContextSequence> sequence,
                                                      const ContextPieceOptions& pieces,
                                                      const at::TensorOptions& options);

// q [B, H, T, d], k and v [B, G, T, d] of this rank's T tokens, plain or DTensors that are cut over rows and heads
// alone. COLLECTIVE over the group, as is the backward pass, which has no second derivative. Error kShape: other sizes
// than the pattern's.
at::Tensor attend_context(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::shared_ptr<const ContextPattern>& pattern, const AttentionScores& scores);

}  // namespace tessera::nn
