#include "tessera/kernels/context_layout.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"

namespace tessera {
namespace {

struct HeldLayout final : torch::CustomClassHolder {
  HeldLayout(const ContextLayout& layout, comm::Group& group) : layout(layout), group(&group) {}
  ContextLayout layout;
  comm::Group* group;
};

at::Tensor wire_form(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool ? tensor.to(at::kByte) : tensor;
}

// [tokens of a rank, ...] of each rank as [tokens, ...].
at::Tensor gathered(const ContextLayout& layout, comm::Group& group, const at::Tensor& own) {
  const int64_t most = layout.most_tokens();
  auto sizes = own.sizes().vec();
  sizes[0] = most;
  const auto filled = own.size(0) == most ? own.contiguous() : at::zeros(sizes, own.options());
  if (own.size(0) != most) filled.narrow(0, 0, own.size(0)).copy_(own);
  sizes[0] = most * layout.ranks();
  const auto all = at::empty(sizes, own.options());
  comm::all_gather_into(group, all, filled, "context").wait();
  return all.index_select(0, layout.rows_by_rank().to(own.device()));
}

// [tokens, ...] of each rank summed, this rank's [tokens of it, ...].
at::Tensor scattered_sum(const ContextLayout& layout, comm::Group& group, const at::Tensor& whole) {
  const int64_t most = layout.most_tokens();
  auto sizes = whole.sizes().vec();
  sizes[0] = most * layout.ranks();
  const auto by_rank = at::zeros(sizes, whole.options());
  by_rank.index_copy_(0, layout.rows_by_rank().to(whole.device()), whole);
  sizes[0] = most;
  const auto own = at::empty(sizes, whole.options());
  comm::reduce_scatter_into(group, own, by_rank, comm::ReduceOp::kSum, "context").wait();
  return own.narrow(0, 0, layout.tokens_of(group.rank()));
}

struct Unshard : torch::autograd::Function<Unshard> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& own,
                            const c10::intrusive_ptr<HeldLayout>& held, int64_t dim) {
    ctx->saved_data["held"] = c10::IValue::make_capsule(held);
    ctx->saved_data["dim"] = dim;
    return gathered(held->layout, *held->group, own.movedim(dim, 0)).movedim(0, dim).contiguous();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    TESSERA_CHECK(!c10::GradMode::is_enabled(), ErrorKind::kInternal,
                  "[context.unshard] has no second derivative. Differentiate without create_graph.");
    const auto& held = static_cast<HeldLayout&>(*ctx->saved_data["held"].toCapsule());
    const int64_t dim = ctx->saved_data["dim"].toInt();
    return {scattered_sum(held.layout, *held.group, grads[0].movedim(dim, 0)).movedim(0, dim).contiguous(), {}, {}};
  }
};

}  // namespace

ContextLayout::ContextLayout(int64_t tokens, int64_t ranks, Order order)
    : tokens_(tokens), ranks_(ranks), order_(order) {
  TESSERA_CHECK(tokens >= 0 && ranks >= 1, ErrorKind::kShape,
                "[context.layout] found {} tokens over {} ranks, wanted none or more over one or more.", tokens, ranks);
}

ContextLayout ContextLayout::of_pytorch(int64_t tokens, int64_t ranks) {
  const bool divides = ranks >= 1 && tokens % (2 * ranks) == 0;
  return ContextLayout(tokens, ranks, divides ? Order::kBalanced : Order::kContiguous);
}

ContextChunk ContextLayout::chunk(int64_t index) const {
  const int64_t least = tokens_ / chunks(), longer = tokens_ % chunks();
  return {.begin = index * least + std::min(index, longer), .tokens = least + (index < longer ? 1 : 0)};
}

std::vector<ContextChunk> ContextLayout::chunks_of(int64_t rank) const {
  TESSERA_CHECK(0 <= rank && rank < ranks_, ErrorKind::kShape,
                "[context.layout] found rank {}, wanted one of the {} over which the sequence lies.", rank, ranks_);
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

int64_t ContextLayout::most_tokens() const {
  int64_t most = 0;
  for (int64_t rank = 0; rank < ranks_; ++rank) most = std::max(most, tokens_of(rank));
  return most;
}

at::Tensor ContextLayout::positions(int64_t rank) const {
  std::vector<at::Tensor> parts;
  for (const auto& each : chunks_of(rank)) parts.push_back(at::arange(each.begin, each.end(), at::kLong));
  return parts.empty() ? at::empty({0}, at::kLong) : at::cat(parts);
}

at::Tensor ContextLayout::rows_by_rank() const {
  const auto rows = at::empty({tokens_}, at::kLong);
  const int64_t most = most_tokens();
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    for (const auto& each : chunks_of(rank)) {
      const int64_t first = rank * most + each.local;
      rows.narrow(0, each.begin, each.tokens).copy_(at::arange(first, first + each.tokens, at::kLong));
    }
  }
  return rows;
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

at::Tensor ContextLayout::unshard(comm::Group& group, const at::Tensor& own, int64_t dim) const {
  const bool fits = own.defined() && dim >= -own.dim() && dim < own.dim() && group.size() == ranks_ &&
                    own.size(dim) == tokens_of(group.rank());
  TESSERA_CHECK(fits, ErrorKind::kShape,
                "[context.unshard] found dim {} of a tensor {} in a group of {}, wanted the {} of {} tokens that rank "
                "{} of {} holds.",
                dim, own.defined() ? c10::str(own.sizes()) : "that is undefined", group.size(),
                group.rank() < ranks_ ? tokens_of(group.rank()) : 0, tokens_, group.rank(), ranks_);
  const int64_t at = dim < 0 ? dim + own.dim() : dim;
  return Unshard::apply(wire_form(own), c10::make_intrusive<HeldLayout>(*this, group), at).to(own.scalar_type());
}

}  // namespace tessera
