#include "tessera/nn/attention/context_attention.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/saved_value.h"
#include "tessera/kernels/attention/partial_attention.h"
#include "tessera/kernels/autograd/kept_results.h"
#include "tessera/nn/attention/attention_mask.h"
#include "tessera/nn/attention/attention_pattern.h"
#include "tessera/nn/attention/context_exchange.h"
#include "tessera/nn/attention/local_heads.h"

namespace tessera::nn {
namespace {

using PieceKind = ContextPiece::Kind;

// ---- the sequence ----

// The state of a rank's document ids, which all ranks receive so that wrong ids are an error on all of them.
constexpr int64_t kNoIds = 0, kGoodIds = 1, kWrongIds = 2;

void check_shares(const ContextParallelism& how, const kernels::ContextLayout& layout, const at::Tensor& shares) {
  for (int64_t rank = 0; rank < layout.ranks(); ++rank) {
    const int64_t *share = shares[rank].const_data_ptr<int64_t>(), *first = shares.const_data_ptr<int64_t>();
    TESSERA_CHECK(
        share[2] != kWrongIds, ErrorKind::kShape,
        "[nn.context] group {}: found document ids of another shape or dtype on its rank {}, wanted int64 [{}, {}], "
        "as its tokens are.",
        how.group->name(), rank, share[0], share[1]);
    TESSERA_CHECK(
        share[0] == first[0] && share[2] == first[2], ErrorKind::kShape,
        "[nn.context] group {}: its rank {} has {} rows {} document ids, its rank 0 {} rows {}. Give all ranks "
        "of a context-parallel group the same rows, each its own tokens of them.",
        how.group->name(), rank, share[0], share[2] != 0 ? "with" : "without", first[0],
        first[2] != 0 ? "with" : "without");
    TESSERA_CHECK(share[1] == layout.tokens_of(rank), ErrorKind::kShape,
                  "[nn.context] group {}: its rank {} has {} tokens of each row, wanted {} of the {} tokens of all "
                  "ranks together. Cut rows with ContextLayout::shard.",
                  how.group->name(), rank, share[1], layout.tokens_of(rank), layout.tokens());
  }
}

// All-gathers three numbers per rank: rows, tokens, and the state of the document ids. int64 [ranks, 3].
at::Tensor gathered_shares(const ContextParallelism& how, const ContextSequenceOptions& wanted, int64_t ids) {
  const auto own = at::tensor({wanted.rows, wanted.tokens, ids}, at::kLong);
  const auto all = at::empty({how.group->size() * own.numel()}, own.options());
  comm::all_gather_into(*how.group, all, own, "context.shares").wait();
  return all.view({how.group->size(), own.numel()});
}

RowDocuments documents_of_row(int64_t row, const int64_t* ids, int64_t tokens) {
  RowDocuments out{.row = row};
  int64_t begin = 0;
  for (const auto& run : document_runs(ids, tokens, row, "nn.context")) {
    if (run.id >= 0) out.documents.push_back({begin, begin + run.tokens});
    begin += run.tokens;
  }
  // Padding behind a single document is treated as part of it: its results are not used, and rows of different lengths
  // then have equal documents and are computed together.
  if (out.documents.size() == 1 && out.documents[0].begin == 0) out.documents[0].end = tokens;
  return out;
}

// Neighbouring rows with equal documents are merged into one entry.
std::vector<RowDocuments> documents_of(const at::Tensor& ids) {
  std::vector<RowDocuments> rows;
  for (int64_t row = 0; row < ids.size(0); ++row) {
    auto found = documents_of_row(row, ids.const_data_ptr<int64_t>() + row * ids.size(1), ids.size(1));
    if (!rows.empty() && rows.back().documents == found.documents) {
      ++rows.back().rows;
    } else {
      rows.push_back(std::move(found));
    }
  }
  return rows;
}

// ---- the pattern ----

// The chunks as they arrive: only the seen parts, one after another in the received tensor.
std::vector<kernels::ContextChunk> packed_chunks(const std::vector<kernels::ContextChunk>& chunks,
                                                 const std::vector<TokenRange>& seen) {
  std::vector<kernels::ContextChunk> out;
  int64_t local = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (seen[i].empty()) continue;
    out.push_back({.begin = seen[i].begin, .tokens = seen[i].end - seen[i].begin, .local = local});
    local += out.back().tokens;
  }
  return out;
}

// For each chunk of the rank `holder`, the tokens that the queries of the rank `reader` see.
std::vector<TokenRange> seen_of_chunks(const ContextSequence& sequence, int64_t reader, int64_t holder,
                                       const ContextPieceOptions& options) {
  std::vector<TokenRange> seen;
  const auto queries = sequence.layout.chunks_of(reader);
  for (const auto& chunk : sequence.layout.chunks_of(holder)) {
    seen.push_back(tokens_seen(sequence.documents, queries, chunk, options));
  }
  return seen;
}

// Step `step` of kAllToAll: the pieces of this rank's queries with the keys of the rank `step` before, and the keys
// that the rank `step` after needs. Both ranks of a transfer compute the same ranges from the same sequence.
ContextPattern::Step rotated_step(const ContextSequence& sequence, int64_t step, const ContextPieceOptions& options) {
  const int64_t ranks = sequence.layout.ranks(), rank = sequence.how.group->rank();
  const int64_t source = (rank + ranks - step) % ranks, target = (rank + step) % ranks;
  const auto& layout = sequence.layout;
  const auto own = layout.chunks_of(rank);
  ContextPattern::Step out;
  if (step == 0) {
    out.pieces = context_pieces(sequence.documents, own, own, options);
    out.keys = layout.tokens_of(rank);
    return out;
  }
  const auto brought = packed_chunks(layout.chunks_of(source), seen_of_chunks(sequence, rank, source, options));
  for (const auto& chunk : brought) out.keys += chunk.tokens;
  out.pieces = context_pieces(sequence.documents, own, brought, options);
  const auto seen = seen_of_chunks(sequence, target, rank, options);
  for (size_t i = 0; i < own.size(); ++i) {
    const int64_t to_local = own[i].local - own[i].begin;
    if (!seen[i].empty()) out.given.push_back({seen[i].begin + to_local, seen[i].end + to_local});
  }
  return out;
}

// One mask serves all masked pieces, because its entries depend only on the distance of query and key. A piece reads
// the columns from mask_origin - distance on.
void add_mask(ContextPattern& pattern, const ContextPieceOptions& options, const at::TensorOptions& tensors) {
  int64_t queries = 0;
  for (const auto& step : pattern.steps) {
    for (const auto& piece : step.pieces) {
      if (piece.kind != PieceKind::kMasked) continue;
      queries = std::max(queries, piece.queries);
      pattern.mask_origin = std::max(pattern.mask_origin, piece.distance);
    }
  }
  if (queries == 0) return;
  pattern.mask = visible_mask({.first_query = pattern.mask_origin,
                               .queries = queries,
                               .keys = pattern.mask_origin + queries,
                               .window = options.sliding_window},
                              tensors);
}

// ---- attention ----

kernels::AttentionPartOptions part_options(const ContextPattern& pattern, const ContextPiece& piece,
                                           const AttentionScores& scores) {
  kernels::AttentionPartOptions out{
      .causal = piece.kind == PieceKind::kCausal, .scale = scores.scale, .softcap = scores.softcap};
  if (piece.kind == PieceKind::kMasked) {
    out.mask = pattern.mask.narrow(0, 0, piece.queries)
                   .narrow(1, pattern.mask_origin - piece.distance, piece.keys)
                   .contiguous();
  }
  return out;
}

at::Tensor queries_of(const at::Tensor& tensor, const ContextPiece& piece) {
  return tensor.narrow(0, piece.row, piece.rows).narrow(2, piece.query, piece.queries);
}

at::Tensor keys_of(const at::Tensor& tensor, const ContextPiece& piece) {
  return tensor.narrow(0, piece.row, piece.rows).narrow(2, piece.key, piece.keys);
}

// A sum of parts at different places. A first part that covers the whole sum becomes the sum without a copy.
class PartsSum {
 public:
  PartsSum(at::IntArrayRef sizes, const at::TensorOptions& options) : sizes_(sizes.vec()), options_(options) {}

  // `where` returns the view of the sum at the part's place.
  void add(const at::Tensor& part, const std::function<at::Tensor(const at::Tensor&)>& where) {
    if (!sum_.defined() && part.sizes() == at::IntArrayRef(sizes_)) {
      sum_ = part.to(options_.dtype());
    } else {
      where(sum()).add_(part);
    }
  }
  const at::Tensor& sum() {
    if (!sum_.defined()) sum_ = at::zeros(sizes_, options_);
    return sum_;
  }

 private:
  std::vector<int64_t> sizes_;
  at::TensorOptions options_;
  at::Tensor sum_;
};

// Computes the pieces of each step as soon as its keys have arrived and adds them to the running result.
kernels::AttentionPart context_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       const ContextPattern& pattern, const AttentionScores& scores) {
  const auto exchange = make_exchange(pattern, at::stack({k, v}));
  kernels::AttentionSums sums(q);
  for (size_t step = 0; step < pattern.steps.size(); ++step) {
    const auto kv = exchange->take(step);
    for (const auto& piece : pattern.steps[step].pieces) {
      const auto part = kernels::attend_part(queries_of(q, piece), keys_of(kv[0], piece), keys_of(kv[1], piece),
                                             part_options(pattern, piece, scores));
      sums.add(part, piece.row, piece.query);
    }
  }
  const auto joined = sums.joined();
  return {joined.out.to(q.scalar_type()), joined.log_sums};
}

// Computes each piece's gradients from the combined result. Keys of a step arrive as in the forward; their gradients
// leave with give_back() after the step.
kernels::AttentionPartGradients context_backward(const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
                                                 const at::Tensor& v, const kernels::AttentionPart& whole,
                                                 const ContextPattern& pattern, const AttentionScores& scores) {
  const auto exchange = make_exchange(pattern, at::stack({k, v}));
  const auto wide = whole.log_sums.scalar_type();
  PartsSum grad_q(q.sizes(), q.options().dtype(wide));
  for (size_t step = 0; step < pattern.steps.size(); ++step) {
    const auto kv = exchange->take(step);
    if (!kv.defined()) {
      exchange->give_back(step, {});
      continue;
    }
    const auto of_step = kv.options().dtype(wide);
    PartsSum grad_k(kv[0].sizes(), of_step), grad_v(kv[1].sizes(), of_step);
    for (const auto& piece : pattern.steps[step].pieces) {
      const auto part = kernels::attend_part_backward(
          queries_of(gradient, piece), queries_of(q, piece), keys_of(kv[0], piece), keys_of(kv[1], piece),
          {queries_of(whole.out, piece), queries_of(whole.log_sums, piece)}, part_options(pattern, piece, scores));
      const auto at_keys = [&](const at::Tensor& all) { return keys_of(all, piece); };
      grad_q.add(part.q, [&](const at::Tensor& all) { return queries_of(all, piece); });
      grad_k.add(part.k, at_keys);
      grad_v.add(part.v, at_keys);
    }
    exchange->give_back(step, at::stack({grad_k.sum(), grad_v.sum()}));
  }
  const auto home = exchange->finish();
  return {grad_q.sum().to(q.scalar_type()), home[0].to(k.scalar_type()), home[1].to(v.scalar_type())};
}

using PatternPtr = std::shared_ptr<const ContextPattern>;

// Autograd function of attention whose result and log sums are already computed.
struct KnownContextAttention : torch::autograd::Function<KnownContextAttention> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& output, const at::Tensor& log_sums,
                            const PatternPtr& pattern, double scale, double softcap) {
    const auto result = output.detach();
    ctx->save_for_backward({q, k, v, result, log_sums});
    ctx->saved_data["pattern"] = make_saved_value(pattern);
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["softcap"] = softcap;
    return result;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    TESSERA_CHECK(!c10::GradMode::is_enabled(), ErrorKind::kInternal,
                  "[nn.context] attention over ranks has no second derivative. Differentiate without create_graph.");
    const auto saved = ctx->get_saved_variables();
    const auto& pattern = *saved_value<PatternPtr>(ctx->saved_data["pattern"]);
    const AttentionScores scores{.scale = ctx->saved_data["scale"].toDouble(),
                                 .softcap = ctx->saved_data["softcap"].toDouble()};
    const auto found = context_backward(grads[0], saved[0], saved[1], saved[2], {saved[3], saved[4]}, pattern, scores);
    return {found.q, found.k, found.v, {}, {}, {}, {}, {}};
  }
};

void check_attended(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ContextSequence& sequence) {
  const int64_t tokens = sequence.layout.tokens_of(sequence.how.group->rank());
  const bool fits = q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == sequence.rows &&
                    k.size(0) == sequence.rows && q.size(2) == tokens && k.size(2) == tokens && k.size(1) > 0 &&
                    q.size(1) % k.size(1) == 0 && k.size(3) == q.size(3);
  TESSERA_CHECK(fits, ErrorKind::kShape,
                "[nn.context] found queries {}, keys {} and values {}, wanted [{}, H, {}, d] and twice [{}, G, {}, d] "
                "with H a multiple of G: this rank's tokens of the pattern. Cached keys cannot be sharded over ranks.",
                c10::str(q.sizes()), c10::str(k.sizes()), c10::str(v.sizes()), sequence.rows, tokens, sequence.rows,
                tokens);
}

at::Tensor attend_locally(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::shared_ptr<const ContextPattern>& pattern, const AttentionScores& scores) {
  check_attended(q, k, v, *pattern->sequence);
  // The forward runs without autograd: KnownContextAttention has the derivative and gets the keys again in backward.
  const auto known = kernels::KeptResults::computed_or_kept([&] {
    const c10::NoGradGuard no_grad;
    const auto computed = context_forward(q, k, v, *pattern, scores);
    return std::vector<at::Tensor>{computed.out, computed.log_sums};
  });
  return KnownContextAttention::apply(q, k, v, known.at(0), known.at(1), pattern, scores.scale, scores.softcap);
}

}  // namespace

RotateMethod rotate_method_of(std::string_view name) {
  if (name == "allgather") return RotateMethod::kAllGather;
  if (name == "alltoall") return RotateMethod::kAllToAll;
  raise(ErrorKind::kConfig,
        "[context_parallel.set_rotate_method] Context Parallel does not support using {} for kv shards rotation. Use "
        "allgather or alltoall.",
        quote(name));
}

// The all-gather runs before any check, so that a rank with wrong arguments does not leave the others waiting: every
// rank gets the same numbers and raises the same error.
std::shared_ptr<const ContextSequence> context_sequence(const ContextParallelism& how,
                                                        const ContextSequenceOptions& wanted) {
  const auto& given = wanted.document_ids;
  const auto ids = given.defined() && is_dtensor(given) ? full_tensor(given) : given;
  const bool fit = ids.defined() && ids.scalar_type() == at::kLong && ids.dim() == 2 && ids.size(0) == wanted.rows &&
                   ids.size(1) == wanted.tokens;
  const auto shares = gathered_shares(how, wanted, !ids.defined() ? kNoIds : fit ? kGoodIds : kWrongIds);
  auto sequence = std::make_shared<ContextSequence>(ContextSequence{
      how, kernels::ContextLayout(shares.select(1, 1).sum().item<int64_t>(), how.group->size()), {}, wanted.rows});
  check_shares(how, sequence->layout, shares);
  if (ids.defined()) {
    const auto whole = sequence->layout.unshard(how.group, ids.cpu(), 1).contiguous();
    sequence->documents = documents_of(whole);
  } else {
    sequence->documents = {{.row = 0, .rows = wanted.rows, .documents = {{0, sequence->layout.tokens()}}}};
  }
  return sequence;
}

int64_t ContextPattern::Step::keys_given() const {
  int64_t sum = 0;
  for (const auto& each : given) sum += each.end - each.begin;
  return sum;
}

std::shared_ptr<const ContextPattern> context_pattern(std::shared_ptr<const ContextSequence> sequence,
                                                      const ContextPieceOptions& pieces,
                                                      const at::TensorOptions& options) {
  auto pattern = std::make_shared<ContextPattern>();
  const auto& layout = sequence->layout;
  if (sequence->how.rotate == RotateMethod::kAllGather) {
    const auto own = layout.chunks_of(sequence->how.group->rank());
    pattern->steps.push_back(
        {.pieces = context_pieces(sequence->documents, own, {{.begin = 0, .tokens = layout.tokens()}}, pieces),
         .keys = layout.tokens(),
         .given = {}});
  } else {
    for (int64_t step = 0; step < layout.ranks(); ++step) {
      pattern->steps.push_back(rotated_step(*sequence, step, pieces));
    }
  }
  add_mask(*pattern, pieces, options);
  pattern->sequence = std::move(sequence);
  return pattern;
}

at::Tensor attend_context(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::shared_ptr<const ContextPattern>& pattern, const AttentionScores& scores) {
  if (!is_dtensor(q)) return attend_locally(q, k, v, pattern, scores);
  TESSERA_CHECK(
      have_local_heads(q, k, v), ErrorKind::kShape,
      "[nn.context] found queries with placements {} and keys and values with others, or tensors sharded over "
      "tokens or within heads; wanted all three sharded over rows or heads. Redistribute them first.",
      to_string(placements(q)));
  return on_local_heads(q, k, v, [&](const at::Tensor& own_q, const at::Tensor& own_k, const at::Tensor& own_v) {
    return attend_locally(own_q, own_k, own_v, pattern, scores);
  });
}

}  // namespace tessera::nn
