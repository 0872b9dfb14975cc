#include "tessera/parallel/tensor_parallel/overlapped_products.h"

#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/saved_value.h"
#include "tessera/kernels/linear/linear.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Splits the tokens of all ranks into chunks. The tokens of every rank are padded to `max_tokens` rows, so that
// collectives have equal sizes. Chunk c contains the rows begin(c) to begin(c + 1) of every rank. The token dim comes
// before the batch dim in these tensors, so that the rows of a chunk on one rank are contiguous.
struct ChunkedTokens {
  OverlapOptions options;
  int64_t ranks, max_tokens, chunks;

  explicit ChunkedTokens(const OverlapOptions& options)
      : options(options),
        ranks(options.along.mesh->size(options.along.mesh_dim)),
        max_tokens((options.tokens + ranks - 1) / ranks),
        chunks(std::max<int64_t>(std::min(options.chunks, max_tokens), 1)) {}

  comm::Group& group() const { return *options.along.mesh->group(options.along.mesh_dim); }
  int64_t own() const {
    return local_range(options.tokens, ranks, options.along.mesh->local_rank(options.along.mesh_dim)).size;
  }
  int64_t begin(int64_t chunk) const { return max_tokens * chunk / chunks; }
  int64_t length(int64_t chunk) const { return begin(chunk + 1) - begin(chunk); }

  // Turns [B, own tokens, d] into [max_tokens, B, d], with zeros after this rank's tokens.
  at::Tensor own_rows(const at::Tensor& x) const {
    const auto rows = x.transpose(0, 1);
    if (own() == max_tokens) return rows.contiguous();
    auto padded = at::zeros({max_tokens, x.size(0), x.size(2)}, x.options());
    padded.narrow(0, 0, own()).copy_(rows);
    return padded;
  }
  // Turns [B, tokens, d] into [ranks, max_tokens, B, d], with zeros after the last token.
  at::Tensor all_rows(const at::Tensor& x) const {
    auto rows = x.transpose(0, 1);
    if (ranks * max_tokens != options.tokens) {
      auto padded = at::zeros({ranks * max_tokens, x.size(0), x.size(2)}, x.options());
      padded.narrow(0, 0, options.tokens).copy_(rows);
      rows = padded;
    }
    return rows.reshape({ranks, max_tokens, x.size(0), x.size(2)});
  }
  // from_all_rows() and from_own_rows() are the inverses of all_rows() and own_rows(): they remove the padding and
  // bring the dims back to [B, tokens, d].
  at::Tensor from_all_rows(const at::Tensor& rows) const {
    return rows.view({ranks * max_tokens, rows.size(2), rows.size(3)}).narrow(0, 0, options.tokens).transpose(0, 1);
  }
  at::Tensor from_own_rows(const at::Tensor& rows) const { return rows.narrow(0, 0, own()).transpose(0, 1); }
};

// All-gathers the chunks in order. The all-gather of the next chunk is in flight while the caller works on the current
// one.
class GatheredChunks {
 public:
  GatheredChunks(const ChunkedTokens& tokens, at::Tensor own_rows) : tokens_(tokens), rows_(std::move(own_rows)) {
    start();
  }
  // Returns the next chunk, [ranks, length, B, d], after starting the all-gather of the chunk after it.
  at::Tensor next() {
    start();
    auto [chunk, pending] = std::move(under_way_.front());
    under_way_.erase(under_way_.begin());
    pending.wait();
    return chunk;
  }

 private:
  void start() {
    if (started_ == tokens_.chunks) return;
    const auto sent = rows_.narrow(0, tokens_.begin(started_), tokens_.length(started_)).contiguous();
    const auto chunk = at::empty({tokens_.ranks, sent.size(0), sent.size(1), sent.size(2)}, sent.options());
    under_way_.emplace_back(chunk, comm::all_gather_into(tokens_.group(), chunk, sent, "chunk of tokens"));
    ++started_;
  }

  const ChunkedTokens& tokens_;
  at::Tensor rows_;
  int64_t started_ = 0;
  std::vector<std::pair<at::Tensor, comm::PendingCollective>> under_way_;
};

// Reduce-scatters the chunks: each rank gets the sum over the ranks for its own rows. All reduce-scatters stay in
// flight until finish().
class ScatteredChunks {
 public:
  ScatteredChunks(const ChunkedTokens& tokens, int64_t batch, int64_t width, const at::TensorOptions& options)
      : tokens_(tokens), rows_(at::empty({tokens.max_tokens, batch, width}, options)) {}
  // Starts the reduce-scatter of the next chunk, [ranks, length, B, d].
  void add(const at::Tensor& chunk) {
    const auto begin = tokens_.begin(added_), length = tokens_.length(added_);
    pending_.push_back(comm::reduce_scatter_into(tokens_.group(), rows_.narrow(0, begin, length), chunk.contiguous(),
                                                 comm::ReduceOp::kSum, "chunk of tokens"));
    ++added_;
  }
  at::Tensor finish() {
    for (auto& pending : pending_) pending.wait();
    return rows_;
  }

 private:
  const ChunkedTokens& tokens_;
  at::Tensor rows_;
  int64_t added_ = 0;
  std::vector<comm::PendingCollective> pending_;
};

at::Tensor flat_rows(const at::Tensor& chunk) { return chunk.reshape({-1, chunk.size(-1)}); }
// chunk [ranks, length, B, d] times the transposed weight [o, d].
at::Tensor product(const at::Tensor& chunk, const at::Tensor& weight) {
  return kernels::product_nt(flat_rows(chunk), weight)
      .view({chunk.size(0), chunk.size(1), chunk.size(2), weight.size(0)});
}
// Adds left^T right, summed over all tokens of a chunk, to `sum`: the gradient of a weight.
void add_outer(at::Tensor& sum, const at::Tensor& left, const at::Tensor& right) {
  const auto outer = kernels::product_nt(flat_rows(left).t(), flat_rows(right).t());
  sum = sum.defined() ? sum.add_(outer) : outer;
}

// Forward all-gathers chunk c + 1 while chunk c is multiplied with all weights. The gathered chunks are saved, so
// backward does not gather again. Backward computes the gradient of a chunk of x, starts its reduce-scatter, and
// computes the weights' gradients of that chunk while the reduce-scatter runs.
struct GatheredProducts : torch::autograd::Function<GatheredProducts> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, at::TensorList weights,
                               const OverlapOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const ChunkedTokens tokens(options);
    GatheredChunks chunks(tokens, tokens.own_rows(x));
    variable_list saved, outputs;
    for (const auto& weight : weights) {
      outputs.push_back(at::empty({tokens.ranks, tokens.max_tokens, x.size(0), weight.size(0)}, x.options()));
    }
    for (int64_t c = 0; c < tokens.chunks; ++c) {
      const auto chunk = chunks.next();
      for (size_t i = 0; i < weights.size(); ++i) {
        outputs[i].narrow(1, tokens.begin(c), tokens.length(c)).copy_(product(chunk, weights[i]));
      }
      saved.push_back(chunk);
    }
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["tokens"] = make_saved_value(tokens);
    for (auto& output : outputs) output = tokens.from_all_rows(output);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto& tokens = saved_value<ChunkedTokens>(ctx->saved_data["tokens"]);
    const auto saved = ctx->get_saved_variables();
    const size_t count = grads.size(), chunks = static_cast<size_t>(tokens.chunks);
    variable_list rows(count), weight_gradients(count);
    for (size_t i = 0; i < count; ++i) {
      if (grads[i].defined()) rows[i] = tokens.all_rows(grads[i]);
    }
    ScatteredChunks scattered(tokens, saved[0].size(2), saved[0].size(3), saved[0].options());
    for (size_t c = 0; c < chunks; ++c) {
      const auto begin = tokens.begin(static_cast<int64_t>(c)), length = tokens.length(static_cast<int64_t>(c));
      at::Tensor sum = at::zeros_like(saved[c]);
      for (size_t i = 0; i < count; ++i) {
        if (rows[i].defined()) sum.add_(product(rows[i].narrow(1, begin, length), saved[chunks + i].t()));
      }
      scattered.add(sum);  // overlaps the gradients of the weights below
      for (size_t i = 0; i < count; ++i) {
        if (rows[i].defined()) add_outer(weight_gradients[i], rows[i].narrow(1, begin, length), saved[c]);
      }
    }
    variable_list out = {tokens.from_own_rows(scattered.finish())};
    out.insert(out.end(), weight_gradients.begin(), weight_gradients.end());
    out.emplace_back();
    return out;
  }
};

// The reverse of GatheredProducts: forward multiplies chunk c + 1 while the reduce-scatter of chunk c runs, and
// backward all-gathers the gradient in chunks.
struct ScatteredProduct : torch::autograd::Function<ScatteredProduct> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const OverlapOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const ChunkedTokens tokens(options);
    ctx->save_for_backward({x, weight});
    ctx->saved_data["tokens"] = make_saved_value(tokens);
    const auto rows = tokens.all_rows(x);
    ScatteredChunks scattered(tokens, x.size(0), weight.size(0), x.options());
    for (int64_t c = 0; c < tokens.chunks; ++c) {
      scattered.add(product(rows.narrow(1, tokens.begin(c), tokens.length(c)), weight));
    }
    return tokens.from_own_rows(scattered.finish());
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto& tokens = saved_value<ChunkedTokens>(ctx->saved_data["tokens"]);
    const auto saved = ctx->get_saved_variables();
    const auto rows = tokens.all_rows(saved[0]);
    GatheredChunks chunks(tokens, tokens.own_rows(grads[0]));
    const auto x_rows = at::empty_like(rows);
    at::Tensor weight_gradient;
    for (int64_t c = 0; c < tokens.chunks; ++c) {
      const auto chunk = chunks.next();
      x_rows.narrow(1, tokens.begin(c), tokens.length(c)).copy_(product(chunk, saved[1].t()));
      add_outer(weight_gradient, chunk, rows.narrow(1, tokens.begin(c), tokens.length(c)));
    }
    return {tokens.from_all_rows(x_rows), weight_gradient, at::Tensor()};
  }
};

void check_overlap(const at::Tensor& x, int64_t tokens_here, int64_t width, const at::Tensor& weight) {
  TESSERA_CHECK(
      x.dim() == 3 && x.size(1) == tokens_here && !is_dtensor(x) && !is_dtensor(weight) && weight.dim() == 2 &&
          weight.size(1) == width,
      ErrorKind::kShape,
      "[parallel.overlapped_products] found [{}] and a weight of [{}], wanted a plain [B, {}, {}] and a weight "
      "of as many columns.",
      fmt::join(x.sizes(), ", "), fmt::join(weight.sizes(), ", "), tokens_here, width);
}

}  // namespace

std::vector<at::Tensor> gathered_products(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                          const std::vector<at::Tensor>& biases, const OverlapOptions& options) {
  const ChunkedTokens tokens(options);
  for (const auto& weight : weights) check_overlap(x, tokens.own(), x.size(-1), weight);
  auto results = GatheredProducts::apply(x, at::TensorList(weights), options);
  for (size_t i = 0; i < results.size() && i < biases.size(); ++i) {
    if (biases[i].defined()) results[i] = results[i] + biases[i];
  }
  return results;
}

at::Tensor scattered_product(const at::Tensor& x, const at::Tensor& weight, const OverlapOptions& options) {
  check_overlap(x, options.tokens, x.size(-1), weight);
  return ScatteredProduct::apply(x, weight, options);
}

}  // namespace tessera
