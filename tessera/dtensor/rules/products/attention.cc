// Sharding rules of scaled dot product attention on the CPU. Batch samples, heads and query positions are independent.
#include "tessera/dtensor/rules/products/attention.h"

namespace tessera {

// If query and key have equal numbers of heads, every mesh dim may shard the heads. With fewer key heads (GQA) a mesh
// dim may shard heads only if it shards the heads of some input already and if both numbers of heads are divisible by
// the product of the sizes of this and the earlier mesh dims that shard heads.
std::vector<bool> can_shard_heads(const OpCall& call) {
  const TensorInput& query = call.inputs[call.input_at(call.arg_named("query"))];
  const TensorInput& key = call.inputs[call.input_at(call.arg_named("key"))];
  int64_t ranks = 1;
  std::vector<bool> can_shard;
  for (int64_t m = 0; m < call.mesh->ndim(); ++m) {
    const bool is_sharded_now = std::ranges::any_of(call.inputs, [&](const TensorInput& input) {
      return input.dim() > 2 && input.placements[m].is_any_shard() && input.placements[m].dim == 1;
    });
    const int64_t with_this = ranks * call.mesh->shape()[m];
    const bool divides = query.sizes[1] % with_this == 0 && key.sizes[1] % with_this == 0;
    can_shard.push_back(query.sizes[1] == key.sizes[1] || (is_sharded_now && divides));
    ranks = can_shard.back() ? with_this : ranks;
  }
  return can_shard;
}

bool uses_dropout(const OpCall& call) {
  const int arg = call.arg_named("dropout_p");
  return arg >= 0 && call.args[arg].toScalar().toDouble() > 0;
}

Placement mask_placement(const TensorInput& mask, int64_t dim) {
  const int64_t own = dim - (4 - mask.dim());
  return own < 0 || mask.sizes[own] == 1 ? Replicate() : Shard(own);
}

namespace {

struct AttentionArgs {
  int query;
  int key;
  int value;
  int mask;
  bool causal;
};

AttentionArgs attention_args(const OpCall& call) {
  int mask = call.arg_named("attn_mask");
  mask = mask < 0 ? call.arg_named("attn_bias") : mask;
  const int causal = call.arg_named("is_causal");
  return {call.input_at(call.arg_named("query")), call.input_at(call.arg_named("key")),
          call.input_at(call.arg_named("value")), mask < 0 ? -1 : call.input_at(mask),
          causal >= 0 && call.args[causal].isBool() && call.bool_at(causal)};
}

using Outputs = decltype(Strategy::outputs);

// Proposes shards of the batch dim and of the head dim for all operands, and shards of the query length with replicated
// keys and values. The query length is not sharded for causal attention, because the mask depends on the global
// position of a query. outputs_of(dim, keys_too) gives the placements of the results; keys_too is true if keys and
// values are sharded, too.
template <class OutputsOf>
void propose_attention_shards(const OpCall& call, Proposal& proposal, const AttentionArgs& args,
                              const OutputsOf& outputs_of) {
  if (uses_dropout(call)) return;
  proposal.supports_strided = call.inputs[args.query].sizes[1] == call.inputs[args.key].sizes[1];
  const int64_t dims[] = {0, 1, 2};
  propose_shards(call, proposal, {dims, args.causal ? 2U : 3U}, [&](int64_t dim) {
    const bool keys_too = dim != 2;
    Strategy strategy{outputs_of(dim, keys_too), {}};
    for (int i = 0; i < static_cast<int>(call.inputs.size()); ++i) {
      const bool is_sharded = keys_too || (i != args.key && i != args.value);
      const Placement placement = is_sharded ? Shard(dim) : Replicate();
      strategy.inputs.push_back(i == args.mask ? mask_placement(call.inputs[i], dim) : placement);
    }
    proposal.strategies.push_back(std::move(strategy));
  });
}

// An output of shape [B, H, S, ...] with the strides that the kernel gives it: those of a contiguous [B, S, H, ...]
// tensor with the dims H and S transposed.
OutputShape heads_after_sequence(std::vector<int64_t> sizes) {
  std::vector<int64_t> lie = sizes;
  std::swap(lie[1], lie[2]);
  const Sizes dense = dense_strides(lie);
  std::vector<int64_t> strides(dense.begin(), dense.end());
  std::swap(strides[1], strides[2]);
  return {std::move(sizes), std::move(strides)};
}

// _scaled_dot_product_flash_attention_for_cpu(query, key, value, ...) -> (output [B, H, S, E], logsumexp [B, H, S])
void propose_forward(const OpCall& call, Proposal& proposal) {
  const AttentionArgs args = attention_args(call);
  propose_attention_shards(call, proposal, args, [](int64_t dim, bool) { return Outputs{Shard(dim)}; });
  const auto& q = call.inputs[args.query].sizes;
  proposal.outputs.push_back(heads_after_sequence({q[0], q[1], q[2], call.inputs[args.value].sizes[3]}));
  proposal.outputs.push_back(heads_after_sequence({q[0], q[1], q[2]}));
}

// The backward: (grad_out, query, key, value, out, logsumexp, ...) -> gradients of query, key and value.
void propose_flash_backward(const OpCall& call, Proposal& proposal) {
  const AttentionArgs args = attention_args(call);
  propose_attention_shards(call, proposal, args, [](int64_t dim, bool keys_too) {
    const Placement of_keys = keys_too ? Shard(dim) : Partial();
    return Outputs{Shard(dim), of_keys, of_keys};
  });
  for (const int input : {args.query, args.key, args.value}) {
    proposal.outputs.push_back(heads_after_sequence(call.inputs[input].sizes.vec()));
  }
}

}  // namespace

void add_attention_rules(RuleTable& table) {
  table.add("aten::_scaled_dot_product_flash_attention_for_cpu", propose_forward);
  table.add("aten::_scaled_dot_product_flash_attention_for_cpu_backward", propose_flash_backward);
}

}  // namespace tessera
