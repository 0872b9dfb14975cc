#include "tessera/kernels/attention/context_layout.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/saved_value.h"

namespace tessera::kernels {
namespace {

constexpr std::string_view kUnshardName = "context";

using GroupPtr = std::shared_ptr<comm::Group>;

// Returns the tensor to send: bool tensors are sent as bytes, others unchanged.
at::Tensor wire_form(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool ? tensor.to(at::kByte) : tensor;
}

// Returns an empty tensor [ranks, ...] with one shard per rank. A shard has the sizes of `one`, but `tokens` in dim
// `dim`.
at::Tensor parts_of_ranks(const at::Tensor& one, int64_t dim, int64_t ranks, int64_t tokens) {
  auto sizes = one.sizes().vec();
  sizes[static_cast<size_t>(dim)] = tokens;
  sizes.insert(sizes.begin(), ranks);
  return at::empty(sizes, one.options());
}

struct Unshard : torch::autograd::Function<Unshard> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& local_shard,
                            const ContextLayout& layout, const GroupPtr& group, int64_t dim) {
    ctx->saved_data["layout"] = make_saved_value(layout);
    ctx->saved_data["group"] = make_saved_value(group);
    ctx->saved_data["dim"] = dim;
    return layout.all_gather(*group, local_shard, dim, kUnshardName);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    TESSERA_CHECK(!c10::GradMode::is_enabled(), ErrorKind::kInternal,
                  "[context.unshard] has no second derivative. Differentiate without create_graph.");
    const auto& layout = saved_value<ContextLayout>(ctx->saved_data["layout"]);
    const auto& group = saved_value<GroupPtr>(ctx->saved_data["group"]);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    return {layout.reduce_scatter(*group, grads[0], dim, kUnshardName), {}, {}, {}};
  }
};

}  // namespace

ContextLayout::ContextLayout(int64_t tokens, int64_t ranks, Order order)
    : tokens_(tokens), ranks_(ranks), order_(order) {
  TESSERA_CHECK(tokens >= 0 && ranks >= 1, ErrorKind::kShape,
                "[context.layout] found {} tokens over {} ranks, wanted at least 0 tokens over at least 1 rank.",
                tokens, ranks);
}

ContextLayout ContextLayout::of_pytorch(int64_t tokens, int64_t ranks) {
  const bool divides = ranks >= 1 && tokens % (2 * ranks) == 0;
  return ContextLayout(tokens, ranks, divides ? Order::kBalanced : Order::kContiguous);
}

// The first tokens % chunks chunks are one token longer than the others.
ContextChunk ContextLayout::chunk(int64_t index) const {
  const int64_t base_tokens = tokens_ / chunks(), longer = tokens_ % chunks();
  return {.begin = index * base_tokens + std::min(index, longer), .tokens = base_tokens + (index < longer ? 1 : 0)};
}

// kBalanced gives a rank an early chunk and a late one: under causal attention a late chunk sees more keys, and the two
// chunks together cost the same on every rank.
std::vector<ContextChunk> ContextLayout::chunks_of(int64_t rank) const {
  TESSERA_CHECK(0 <= rank && rank < ranks_, ErrorKind::kShape,
                "[context.layout] found rank {}, wanted one of the {} ranks that shard the sequence.", rank, ranks_);
  std::vector<ContextChunk> held = {chunk(rank)};
  if (order_ == Order::kBalanced) held.push_back(chunk(2 * ranks_ - 1 - rank));
  if (held.size() == 2) held[1].local = held[0].tokens;
  std::erase_if(held, [](const ContextChunk& each) { return each.tokens == 0; });
  return held;
}

int64_t ContextLayout::tokens_of(int64_t rank) const {
  int64_t sum = 0;
  for (const auto& each : chunks_of(rank)) sum += each.tokens;
  return sum;
}

int64_t ContextLayout::longest_shard_tokens() const {
  int64_t longest = 0;
  for (int64_t rank = 0; rank < ranks_; ++rank) longest = std::max(longest, tokens_of(rank));
  return longest;
}

at::Tensor ContextLayout::positions(int64_t rank) const {
  std::vector<at::Tensor> parts;
  for (const auto& each : chunks_of(rank)) parts.push_back(at::arange(each.begin, each.end(), at::kLong));
  return parts.empty() ? at::empty({0}, at::kLong) : at::cat(parts);
}

// All-gathers the shards, padded to the longest shard because all ranks must send the same size, and concatenates the
// chunks of all ranks in the order of the sequence.
at::Tensor ContextLayout::all_gather(comm::Group& group, const at::Tensor& local_shard, int64_t dim,
                                     std::string_view name) const {
  if (tokens_ == 0) return local_shard.contiguous();
  const int64_t longest = longest_shard_tokens(), tokens = local_shard.size(dim);
  const auto by_rank = parts_of_ranks(local_shard, dim, ranks_, longest);
  auto filled = local_shard.contiguous();
  if (tokens != longest) {
    filled = at::zeros(by_rank.sizes().slice(1), local_shard.options());
    filled.narrow(dim, 0, tokens).copy_(local_shard);
  }
  comm::all_gather_into(group, by_rank, filled, name).wait();
  std::vector<std::pair<int64_t, at::Tensor>> parts;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    for (const auto& chunk : chunks_of(rank)) {
      parts.emplace_back(chunk.begin, by_rank[rank].narrow(dim, chunk.local, chunk.tokens));
    }
  }
  std::ranges::sort(parts, [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<at::Tensor> in_order;
  for (auto& part : parts) in_order.push_back(std::move(part.second));
  return at::cat(in_order, dim);
}

// The adjoint of all_gather(): the chunks of each rank are packed into one padded row per rank, so that one
// reduce-scatter sums these rows over the ranks and gives each rank the sum of its row.
at::Tensor ContextLayout::reduce_scatter(comm::Group& group, const at::Tensor& whole, int64_t dim,
                                         std::string_view name) const {
  const auto by_rank = parts_of_ranks(whole, dim, ranks_, longest_shard_tokens()).zero_();
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    for (const auto& chunk : chunks_of(rank)) {
      by_rank[rank].narrow(dim, chunk.local, chunk.tokens).copy_(whole.narrow(dim, chunk.begin, chunk.tokens));
    }
  }
  const auto local_shard = at::empty(by_rank.sizes().slice(1), whole.options());
  comm::reduce_scatter_into(group, local_shard, by_rank, comm::ReduceOp::kSum, name).wait();
  return local_shard.narrow(dim, 0, tokens_of(group.rank())).contiguous();
}

at::Tensor ContextLayout::shard(const at::Tensor& whole, int64_t dim, int64_t rank) const {
  const bool fits = whole.defined() && dim >= -whole.dim() && dim < whole.dim() && whole.size(dim) == tokens_;
  TESSERA_CHECK(fits, ErrorKind::kShape,
                "[context.shard] found dim {} of a tensor {}, wanted a dim of the {} tokens of the sequence.", dim,
                whole.defined() ? c10::str(whole.sizes()) : "that is undefined", tokens_);
  std::vector<at::Tensor> parts;
  for (const auto& each : chunks_of(rank)) parts.push_back(whole.narrow(dim, each.begin, each.tokens));
  return parts.empty() ? whole.narrow(dim, 0, 0).clone() : at::cat(parts, dim);
}

at::Tensor ContextLayout::unshard(const std::shared_ptr<comm::Group>& group, const at::Tensor& local_shard,
                                  int64_t dim) const {
  TESSERA_CHECK(group != nullptr, ErrorKind::kShape, "[context.unshard] found no group, wanted that of {} ranks.",
                ranks_);
  const int64_t size = group->size(), rank = group->rank();
  const bool fits = local_shard.defined() && dim >= -local_shard.dim() && dim < local_shard.dim() && size == ranks_ &&
                    local_shard.size(dim) == tokens_of(rank);
  TESSERA_CHECK(fits, ErrorKind::kShape,
                "[context.unshard] found dim {} of a tensor {} in a group of {}, wanted the {} of {} tokens that rank "
                "{} of {} holds.",
                dim, local_shard.defined() ? c10::str(local_shard.sizes()) : "that is undefined", size,
                rank < ranks_ ? tokens_of(rank) : 0, tokens_, rank, ranks_);
  const int64_t at = dim < 0 ? dim + local_shard.dim() : dim;
  return Unshard::apply(wire_form(local_shard), *this, group, at).to(local_shard.scalar_type());
}

}  // namespace tessera::kernels
