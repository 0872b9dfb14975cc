#include "tessera/kernels/logprobs/context.h"

#include <torch/csrc/autograd/custom_function.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/kernels/attention/context_layout.h"
#include "tessera/kernels/logprobs/detail/context_tokens.h"

namespace tessera::kernels {
namespace {

struct AllReduceSum : torch::autograd::Function<AllReduceSum> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, comm::Group& group) {
    const auto sum = x.clone(at::MemoryFormat::Contiguous);
    comm::all_reduce(group, sum, comm::ReduceOp::kSum, "all_reduce_sum").wait();
    return sum;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    return {grads[0], {}};
  }
};

bool is_single_rank(const std::shared_ptr<comm::Group>& group) { return !group || group->size() == 1; }

}  // namespace

at::Tensor get_tokens_on_this_cp_rank(const at::Tensor& input, int64_t cp_rank, int64_t cp_size, int64_t seq_dim) {
  if (cp_size == 1) return input;
  return ContextLayout(input.size(seq_dim), cp_size).shard(input, seq_dim, cp_rank);
}

// All-gathers the shard sizes first, because the layout follows from the sizes of all ranks. So sequences of any length
// are supported, and sizes that fit no balanced layout are an error on all ranks.
at::Tensor allgather_cp_sharded_tensor(const at::Tensor& tensor, const std::shared_ptr<comm::Group>& group,
                                       int64_t seq_dim) {
  if (is_single_rank(group)) return tensor;
  const auto lengths = detail::tokens_of_ranks(*group, tensor.size(seq_dim), tensor.device());
  return detail::balanced_layout("allgather_cp_sharded_tensor", lengths).unshard(group, tensor, seq_dim);
}

// All-gathers the shards of all ranks into the whole sequence and keeps this rank's contiguous part. The backward is a
// reduce-scatter, which gives each rank the gradient of the shard that it passed (in ContextLayout's order kBalanced).
at::Tensor cp_load_balanced_to_contiguous(const at::Tensor& tensor, const std::shared_ptr<comm::Group>& group,
                                          int64_t seq_dim) {
  if (is_single_rank(group)) return tensor;
  const int64_t own = tensor.size(seq_dim);
  const auto lengths = detail::tokens_of_ranks(*group, own, tensor.device());
  for (const int64_t other : lengths) {
    TESSERA_CHECK(other == lengths[0], ErrorKind::kShape,
                  "[kernels.cp_load_balanced_to_contiguous] found {} and {} tokens on two ranks of {}, wanted as many "
                  "on all. Pad the sequence to a multiple of 2 * {}.",
                  lengths[0], other, group->name(), group->size());
  }
  return detail::balanced_layout("cp_load_balanced_to_contiguous", lengths)
      .unshard(group, tensor, seq_dim)
      .narrow(seq_dim, group->rank() * own, own);
}

at::Tensor cp_shift_next(const at::Tensor& x, const std::shared_ptr<comm::Group>& group, const at::Scalar& fill) {
  TESSERA_CHECK(
      x.dim() >= 1 && x.size(-1) > 0 && !x.requires_grad(), ErrorKind::kShape,
      "[kernels.cp_shift_next] found a shard {}{}, wanted [..., L] of at least one token, without a gradient.",
      c10::str(x.sizes()), x.requires_grad() ? " that needs a gradient" : "");
  // In the sequence, the last element of this rank's shard is followed by the first element of the next rank's shard.
  // So each rank all-gathers the first elements of all shards.
  const auto first = x.select(-1, 0).contiguous();
  at::Tensor behind = at::full_like(first, fill);
  if (!is_single_rank(group)) {
    auto sizes = first.sizes().vec();
    sizes.insert(sizes.begin(), group->size());
    const auto firsts = at::empty(sizes, first.options());
    comm::all_gather_into(*group, firsts, first, "cp_shift_next").wait();
    if (group->rank() + 1 < group->size()) behind = firsts[group->rank() + 1];
  }
  return at::cat({x.narrow(-1, 1, x.size(-1) - 1), behind.unsqueeze(-1)}, -1);
}

at::Tensor all_reduce_sum(const at::Tensor& x, const std::shared_ptr<comm::Group>& group) {
  return is_single_rank(group) ? x : AllReduceSum::apply(x, *group);
}

namespace detail {

std::vector<int64_t> tokens_of_ranks(comm::Group& group, int64_t own, const at::Device& device) {
  const auto lengths = at::empty({group.size()}, at::TensorOptions(at::kLong).device(device));
  comm::all_gather_into(group, lengths, at::full({1}, own, lengths.options()), "context tokens").wait();
  const auto here = lengths.cpu();
  return {here.const_data_ptr<int64_t>(), here.const_data_ptr<int64_t>() + here.numel()};
}

ContextLayout balanced_layout(const char* verb, const std::vector<int64_t>& tokens_of_ranks) {
  int64_t sum = 0;
  for (const int64_t each : tokens_of_ranks) sum += each;
  const ContextLayout layout(sum, static_cast<int64_t>(tokens_of_ranks.size()));
  for (size_t rank = 0; rank < tokens_of_ranks.size(); ++rank) {
    const int64_t wanted = layout.tokens_of(static_cast<int64_t>(rank));
    TESSERA_CHECK(
        tokens_of_ranks[rank] == wanted, ErrorKind::kShape,
        "[kernels.{}] rank {} of the context-parallel group has {} of {} tokens, wanted {}. Cut sequences with "
        "get_tokens_on_this_cp_rank.",
        verb, rank, tokens_of_ranks[rank], sum, wanted);
  }
  return layout;
}

}  // namespace detail
}  // namespace tessera::kernels
