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
#include "tessera/kernels/autograd/activation_checkpoint_cache.h"
#include "tessera/nn/attention/attention_mask.h"
#include "tessera/nn/attention/attention_pattern.h"
#include "tessera/nn/attention/context_exchange.h"
#include "tessera/nn/attention/local_heads.h"

namespace tessera::nn {
namespace {

using PieceKind = ContextPiece::Kind;

// ---- ContextSequence: the tokens and documents of all ranks ----

// The state of a rank's document ids. All ranks exchange these states, so that wrong ids on one rank are an error on
// all ranks.
constexpr int64_t kNoIds = 0, kGoodIds = 1, kWrongIds = 2;

void check_rank_infos(const ContextParallelGroup& context_parallel, const kernels::ContextLayout& layout,
                      const at::Tensor& rank_infos) {
  for (int64_t rank = 0; rank < layout.ranks(); ++rank) {
    const int64_t *rank_info = rank_infos[rank].const_data_ptr<int64_t>(),
                  *first = rank_infos.const_data_ptr<int64_t>();
    TESSERA_CHECK(
        rank_info[2] != kWrongIds, ErrorKind::kShape,
        "[nn.context] group {}: found document ids of another shape or dtype on its rank {}, wanted int64 [{}, {}], "
        "as its tokens are.",
        context_parallel.group->name(), rank, rank_info[0], rank_info[1]);
    TESSERA_CHECK(
        rank_info[0] == first[0] && rank_info[2] == first[2], ErrorKind::kShape,
        "[nn.context] group {}: its rank {} has {} rows {} document ids, its rank 0 {} rows {}. Give all ranks "
        "of a context-parallel group the same rows, each its own tokens of them.",
        context_parallel.group->name(), rank, rank_info[0], rank_info[2] != 0 ? "with" : "without", first[0],
        first[2] != 0 ? "with" : "without");
    TESSERA_CHECK(rank_info[1] == layout.tokens_of(rank), ErrorKind::kShape,
                  "[nn.context] group {}: its rank {} has {} tokens of each row, wanted {} of the {} tokens of all "
                  "ranks together. Cut rows with ContextLayout::shard.",
                  context_parallel.group->name(), rank, rank_info[1], layout.tokens_of(rank), layout.tokens());
  }
}

// All-gathers three numbers per rank: rows, tokens, and `ids`, which says whether the rank has document ids and whether
// they are valid (kNoIds, kGoodIds or kWrongIds). Returns int64 [ranks, 3].
at::Tensor all_gather_rank_infos(const ContextParallelGroup& context_parallel,
                                 const ContextSequenceOptions& sequence_options, int64_t ids) {
  const auto own = at::tensor({sequence_options.rows, sequence_options.tokens, ids}, at::kLong);
  const auto all = at::empty({context_parallel.group->size() * own.numel()}, own.options());
  comm::all_gather_into(*context_parallel.group, all, own, "context.shares").wait();
  return all.view({context_parallel.group->size(), own.numel()});
}

RowDocuments documents_of_row(int64_t row, const int64_t* ids, int64_t tokens) {
  RowDocuments out{.row = row};
  int64_t begin = 0;
  for (const auto& run : document_runs(ids, tokens, row, "nn.context")) {
    if (run.id >= 0) out.documents.push_back({begin, begin + run.tokens});
    begin += run.tokens;
  }
  // If a row is one document and then padding, treat the padding as part of the document; the results of padding are
  // not used. Rows of different lengths then have equal documents and are computed together.
  if (out.documents.size() == 1 && out.documents[0].begin == 0) out.documents[0].end = tokens;
  return out;
}

// Returns the documents of all rows. Neighbouring rows with equal documents are merged into one entry.
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

// ---- ContextPattern: what a rank computes, receives and sends ----

// Returns the chunks of a received tensor of keys. Of each chunk of the sending rank only the token range in `seen` is
// sent; the received tensor has these ranges one after the other. A chunk with an empty range is left out.
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

// Returns, for each chunk of rank `holder`, the tokens that the queries of rank `reader` see.
std::vector<TokenRange> seen_of_chunks(const ContextSequence& sequence, int64_t reader, int64_t holder,
                                       const ContextPieceOptions& options) {
  std::vector<TokenRange> seen;
  const auto queries = sequence.layout.chunks_of(reader);
  for (const auto& chunk : sequence.layout.chunks_of(holder)) {
    seen.push_back(tokens_seen(sequence.documents, queries, chunk, options));
  }
  return seen;
}

// Returns step `step` of kAllToAll: the pieces of this rank's queries with the keys of rank - step, and the ranges of
// this rank's keys that are sent to rank + step (modulo the number of ranks). Sender and receiver compute the same
// ranges from the same ContextSequence.
ContextPattern::RotationStep rotated_step(const ContextSequence& sequence, int64_t step,
                                          const ContextPieceOptions& options) {
  const int64_t ranks = sequence.layout.ranks(), rank = sequence.context_parallel.group->rank();
  const int64_t source = (rank + ranks - step) % ranks, target = (rank + step) % ranks;
  const auto& layout = sequence.layout;
  const auto own = layout.chunks_of(rank);
  ContextPattern::RotationStep out;
  if (step == 0) {
    out.pieces = context_pieces(sequence.documents, own, own, options);
    out.keys = layout.tokens_of(rank);
    return out;
  }
  const auto received_chunks = packed_chunks(layout.chunks_of(source), seen_of_chunks(sequence, rank, source, options));
  for (const auto& chunk : received_chunks) out.keys += chunk.tokens;
  out.pieces = context_pieces(sequence.documents, own, received_chunks, options);
  const auto seen = seen_of_chunks(sequence, target, rank, options);
  for (size_t i = 0; i < own.size(); ++i) {
    const int64_t to_local = own[i].local - own[i].begin;
    if (!seen[i].empty()) out.sent_ranges.push_back({seen[i].begin + to_local, seen[i].end + to_local});
  }
  return out;
}

// One mask serves all pieces of kind kMasked, because an entry depends only on the distance between query and key.
// Column mask_origin of the mask is the key at the position of the mask's first query. A piece's first key is
// piece.distance before its first query, so the piece reads the columns from mask_origin - piece.distance on.
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

kernels::PartialAttentionOptions part_options(const ContextPattern& pattern, const ContextPiece& piece,
                                              const AttentionScoreOptions& scores) {
  kernels::PartialAttentionOptions out{
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

// Adds gradients of slices of a tensor to the gradient of the whole tensor. If the first slice is the whole tensor, its
// gradient becomes the sum without a copy.
class GradientSum {
 public:
  GradientSum(at::IntArrayRef sizes, const at::TensorOptions& options) : sizes_(sizes.vec()), options_(options) {}

  // Adds `part`, the gradient of one slice of the tensor, to the gradient of the whole tensor (sum_). `where` is called
  // with the gradient of the whole tensor and returns the view of it that belongs to this slice.
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

// Computes the pieces of each step as soon as the step's keys are received, and merges them into the result by their
// log-sums.
kernels::PartialAttention context_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                          const ContextPattern& pattern, const AttentionScoreOptions& scores) {
  const auto exchange = make_exchange(pattern, at::stack({k, v}));
  kernels::PartialAttentionMerger sums(q);
  for (size_t step = 0; step < pattern.steps.size(); ++step) {
    const auto kv = exchange->receive_step(step);
    for (const auto& piece : pattern.steps[step].pieces) {
      const auto part = kernels::partial_attention_forward(queries_of(q, piece), keys_of(kv[0], piece),
                                                           keys_of(kv[1], piece), part_options(pattern, piece, scores));
      sums.add(part, piece.row, piece.query);
    }
  }
  const auto joined = sums.merged();
  return {joined.out.to(q.scalar_type()), joined.log_sums};
}

// Computes each piece's gradients from the result of the whole forward (`whole`). The keys of each step are received
// again, as in the forward, and after the step return_gradient() sends the gradients of these keys to their owner.
kernels::PartialAttentionGradients context_backward(const at::Tensor& gradient, const at::Tensor& q,
                                                    const at::Tensor& k, const at::Tensor& v,
                                                    const kernels::PartialAttention& whole,
                                                    const ContextPattern& pattern,
                                                    const AttentionScoreOptions& scores) {
  const auto exchange = make_exchange(pattern, at::stack({k, v}));
  const auto wide = whole.log_sums.scalar_type();
  GradientSum grad_q(q.sizes(), q.options().dtype(wide));
  for (size_t step = 0; step < pattern.steps.size(); ++step) {
    const auto kv = exchange->receive_step(step);
    if (!kv.defined()) {
      exchange->return_gradient(step, {});
      continue;
    }
    const auto of_step = kv.options().dtype(wide);
    GradientSum grad_k(kv[0].sizes(), of_step), grad_v(kv[1].sizes(), of_step);
    for (const auto& piece : pattern.steps[step].pieces) {
      const auto part = kernels::partial_attention_backward(
          queries_of(gradient, piece), queries_of(q, piece), keys_of(kv[0], piece), keys_of(kv[1], piece),
          {queries_of(whole.out, piece), queries_of(whole.log_sums, piece)}, part_options(pattern, piece, scores));
      const auto at_keys = [&](const at::Tensor& all) { return keys_of(all, piece); };
      grad_q.add(part.q, [&](const at::Tensor& all) { return queries_of(all, piece); });
      grad_k.add(part.k, at_keys);
      grad_v.add(part.v, at_keys);
    }
    exchange->return_gradient(step, at::stack({grad_k.sum(), grad_v.sum()}));
  }
  const auto home = exchange->finish();
  return {grad_q.sum().to(q.scalar_type()), home[0].to(k.scalar_type()), home[1].to(v.scalar_type())};
}

using PatternPtr = std::shared_ptr<const ContextPattern>;

// The autograd function of attention over ranks. forward() does not compute attention: the caller has computed `output`
// and `log_sums` and passes them, and forward() saves them for backward.
struct ContextAttentionFunction : torch::autograd::Function<ContextAttentionFunction> {
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
    const AttentionScoreOptions scores{.scale = ctx->saved_data["scale"].toDouble(),
                                       .softcap = ctx->saved_data["softcap"].toDouble()};
    const auto found = context_backward(grads[0], saved[0], saved[1], saved[2], {saved[3], saved[4]}, pattern, scores);
    return {found.q, found.k, found.v, {}, {}, {}, {}, {}};
  }
};

void check_attended(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ContextSequence& sequence) {
  const int64_t tokens = sequence.layout.tokens_of(sequence.context_parallel.group->rank());
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
                          const std::shared_ptr<const ContextPattern>& pattern, const AttentionScoreOptions& scores) {
  check_attended(q, k, v, *pattern->sequence);
  // The forward runs without autograd. ContextAttentionFunction computes the gradients; its backward receives the other
  // ranks' keys again, so they are not saved.
  const auto known = kernels::ActivationCheckpointCache::cached_or_computed([&] {
    const c10::NoGradGuard no_grad;
    const auto computed = context_forward(q, k, v, *pattern, scores);
    return std::vector<at::Tensor>{computed.out, computed.log_sums};
  });
  return ContextAttentionFunction::apply(q, k, v, known.at(0), known.at(1), pattern, scores.scale, scores.softcap);
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

// The all-gather of the rank infos runs before any check. A rank with wrong arguments therefore does not leave other
// ranks waiting: every rank checks the same numbers and throws the same error.
std::shared_ptr<const ContextSequence> context_sequence(const ContextParallelGroup& context_parallel,
                                                        const ContextSequenceOptions& sequence_options) {
  const auto& ids_tensor = sequence_options.document_ids;
  const auto ids = ids_tensor.defined() && is_dtensor(ids_tensor) ? full_tensor(ids_tensor) : ids_tensor;
  const bool fit = ids.defined() && ids.scalar_type() == at::kLong && ids.dim() == 2 &&
                   ids.size(0) == sequence_options.rows && ids.size(1) == sequence_options.tokens;
  const auto rank_infos = all_gather_rank_infos(context_parallel, sequence_options,
                                                !ids.defined() ? kNoIds
                                                : fit          ? kGoodIds
                                                               : kWrongIds);
  auto sequence = std::make_shared<ContextSequence>(ContextSequence{
      context_parallel,
      kernels::ContextLayout(rank_infos.select(1, 1).sum().item<int64_t>(), context_parallel.group->size()),
      {},
      sequence_options.rows});
  check_rank_infos(context_parallel, sequence->layout, rank_infos);
  if (ids.defined()) {
    const auto whole = sequence->layout.unshard(context_parallel.group, ids.cpu(), 1).contiguous();
    sequence->documents = documents_of(whole);
  } else {
    sequence->documents = {{.row = 0, .rows = sequence_options.rows, .documents = {{0, sequence->layout.tokens()}}}};
  }
  return sequence;
}

int64_t ContextPattern::RotationStep::sent_keys() const {
  int64_t sum = 0;
  for (const auto& each : sent_ranges) sum += each.end - each.begin;
  return sum;
}

std::shared_ptr<const ContextPattern> context_pattern(std::shared_ptr<const ContextSequence> sequence,
                                                      const ContextPieceOptions& pieces,
                                                      const at::TensorOptions& options) {
  auto pattern = std::make_shared<ContextPattern>();
  const auto& layout = sequence->layout;
  if (sequence->context_parallel.rotate == RotateMethod::kAllGather) {
    const auto own = layout.chunks_of(sequence->context_parallel.group->rank());
    pattern->steps.push_back(
        {.pieces = context_pieces(sequence->documents, own, {{.begin = 0, .tokens = layout.tokens()}}, pieces),
         .keys = layout.tokens(),
         .sent_ranges = {}});
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
                          const std::shared_ptr<const ContextPattern>& pattern, const AttentionScoreOptions& scores) {
  if (!is_dtensor(q)) return attend_locally(q, k, v, pattern, scores);
  TESSERA_CHECK(
      has_local_heads(q, k, v), ErrorKind::kShape,
      "[nn.context] found queries with placements {} and keys and values with others, or tensors sharded over "
      "tokens or within heads; wanted all three sharded over rows or heads. Redistribute them first.",
      to_string(placements(q)));
  return run_on_local_heads(q, k, v, [&](const at::Tensor& own_q, const at::Tensor& own_k, const at::Tensor& own_v) {
    return attend_locally(own_q, own_k, own_v, pattern, scores);
  });
}

}  // namespace tessera::nn
