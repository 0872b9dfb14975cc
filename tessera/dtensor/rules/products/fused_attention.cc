// Sharding rules of the attention kernels of accelerators (flash, memory-efficient, cuDNN). Batch samples and heads are
// independent.
#include "tessera/dtensor/rules/products/attention.h"

namespace tessera {

namespace {

int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::ranges::any_of(names, [&](const char* each) { return name == each; });
}

// Returns the placement of an operand if dim `dim` of the [B, H, ...] operands is sharded. Random seeds, offsets and
// sequence lengths are replicated. attn_bias is replicated in dims in which it broadcasts.
Placement operand_placement(const OpCall& call, const TensorInput& input, int64_t dim) {
  const std::string& name = call.op.args[input.arg].name;
  if (is_one_of(name,
                {"philox_seed", "philox_offset", "cum_seq_q", "cum_seq_k", "q_descale", "k_descale", "v_descale"})) {
    return Replicate();
  }
  return name == "attn_bias" ? mask_placement(input, dim) : Shard(dim);
}

void add_shards(const OpCall& call, Proposal& proposal, size_t sharded_outputs, size_t outputs) {
  proposal.supports_strided = false;
  proposal.supports_empty_shards = false;
  if (uses_dropout(call)) return;
  propose_shards(call, proposal, {1, 0}, [&](int64_t dim) {
    Strategy strategy;
    strategy.outputs.assign(sharded_outputs, Shard(dim));
    strategy.outputs.resize(outputs, Replicate());
    for (const auto& input : call.inputs) strategy.inputs.push_back(operand_placement(call, input, dim));
    proposal.strategies.push_back(std::move(strategy));
  });
  proposal.allows_new_shards = true;
}

std::vector<int64_t> output_sizes(const OpCall& call) {
  const auto& query = call.inputs[0].sizes;
  return {query[0], query[1], query[2], call.inputs[2].sizes[3]};
}

// The flash kernel returns the tensors output, logsumexp [B, H, L], cum_seq_q, cum_seq_k, rng_state, unused and
// debug_attn_mask. It also returns the numbers max_q and max_k, which have no placement.
void propose_flash(const OpCall& call, Proposal& proposal) {
  add_shards(call, proposal, 2, 7);
  const auto& query = call.inputs[0].sizes;
  proposal.output(output_sizes(call));
  proposal.output({query[0], query[1], query[2]});
  proposal.outputs.resize(4, OutputShape{});  // sequence lengths, undefined for dense operands
  proposal.outputs.push_back({{2}, {}});      // rng_state
  proposal.outputs.resize(7, OutputShape{{}, {}});
}

// The memory-efficient kernel returns output, logsumexp, philox_seed and philox_offset.
void propose_efficient(const OpCall& call, Proposal& proposal) {
  const bool keeps = call.bool_at(call.arg_named("compute_log_sumexp"));
  add_shards(call, proposal, 2, 4);
  const auto& query = call.inputs[0].sizes;
  proposal.output(output_sizes(call));
  proposal.output({query[0], query[1], keeps ? rounded_up(query[2], 32) : 0});
  proposal.outputs.resize(4, OutputShape{});
}

// The cuDNN kernel returns output, logsumexp [B, H, L, 1], cum_seq_q, cum_seq_k, max_q, max_k, philox_seed,
// philox_offset and debug_attn_mask.
void propose_cudnn(const OpCall& call, Proposal& proposal) {
  add_shards(call, proposal, 2, 7);
  const auto& query = call.inputs[0].sizes;
  proposal.output(output_sizes(call));
  proposal.output({query[0], query[1], query[2], 1});
  proposal.outputs.resize(7, OutputShape{});
}

// Rule of the backward kernels. They return the gradients of query, key and value; with `of_bias` also that of
// attn_bias.
Rule backward(bool of_bias) {
  return [of_bias](const OpCall& call, Proposal& proposal) {
    add_shards(call, proposal, 3, 3);
    for (const char* name : {"query", "key", "value"}) {
      proposal.output(call.inputs[call.input_at(call.arg_named(name))].sizes);
    }
    if (!of_bias) return;
    const int bias = call.input_at(call.arg_named("attn_bias"));
    proposal.outputs.push_back({bias < 0 ? std::vector<int64_t>() : call.inputs[bias].sizes.vec(), {}});
    for (auto& strategies : proposal.by_mesh_dim) {
      for (auto& strategy : strategies) {  // the gradient of a replicated bias is a sum over the ranks
        const bool repeated = bias >= 0 && strategy.inputs[bias].is_replicate();
        strategy.outputs.push_back(bias < 0 ? Replicate() : repeated ? Partial() : strategy.inputs[bias]);
      }
    }
  };
}

}  // namespace

void add_fused_attention_rules(RuleTable& table) {
  table.add("aten::_scaled_dot_product_flash_attention", propose_flash);
  table.add("aten::_scaled_dot_product_efficient_attention", propose_efficient);
  table.add("aten::_scaled_dot_product_cudnn_attention", propose_cudnn);
  table.add(
      {"aten::_scaled_dot_product_flash_attention_backward", "aten::_scaled_dot_product_cudnn_attention_backward"},
      backward(false));
  table.add("aten::_scaled_dot_product_efficient_attention_backward", backward(true));
}

}  // namespace tessera
