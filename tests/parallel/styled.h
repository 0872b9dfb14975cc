// A small transformer block of the library's layers, and the values that tests of tensor parallelism compare.
#pragma once

#include <ATen/ops/embedding.h>

#include "tessera/nn/attention/attention.h"
#include "tessera/nn/layers.h"
#include "tessera/parallel/tensor_parallel/parallelize_module.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {

// Fills the parameters with the same values on every rank, and in every module with the same parameters.
inline void draw(nn::Module& module, uint64_t seed = 5) {
  const at::NoGradGuard no_grad;
  Values values(seed);
  for (const auto& named : module.named_parameters()) {
    named.slot->parameter.copy_(values(named.slot->parameter.sizes().vec()));
  }
}

struct Block : nn::Callable<Block> {
  std::shared_ptr<nn::RMSNorm> norm;
  std::shared_ptr<nn::MLP> mlp;
  Block(int64_t width, int64_t inner, bool bias) {
    const nn::ParameterOptions options{.device = test_device()};
    register_module("norm", norm, std::make_shared<nn::RMSNorm>(width, nn::NormOptions{}, options));
    register_module("mlp", mlp, std::make_shared<nn::MLP>(width, inner, nn::MLPOptions{.bias = bias}, options));
  }
  at::Tensor forward(const at::Tensor& x) { return x + (*mlp)((*norm)(x)); }
};

// Embedding, blocks, norm and a head, which may be tied to the embedding.
struct Stack : nn::Callable<Stack> {
  std::shared_ptr<nn::Embedding> embed_tokens;
  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<nn::RMSNorm> norm;
  std::shared_ptr<nn::Head> lm_head;

  struct Shape {
    int64_t vocab = 11, width = 6, inner = 10, blocks = 2;
    bool tied = false;
    bool bias = true;
  };
  explicit Stack(const Shape& shape) {
    const nn::ParameterOptions options{.device = test_device()};
    register_module("embed_tokens", embed_tokens, std::make_shared<nn::Embedding>(shape.vocab, shape.width, options));
    blocks.resize(static_cast<size_t>(shape.blocks));
    for (size_t i = 0; i < blocks.size(); ++i) {
      register_module("block" + std::to_string(i), blocks[i],
                      std::make_shared<Block>(shape.width, shape.inner, shape.bias));
    }
    register_module("norm", norm, std::make_shared<nn::RMSNorm>(shape.width, nn::NormOptions{}, options));
    register_module("lm_head", lm_head, std::make_shared<nn::Head>(shape.width, shape.vocab, options));
    if (shape.tied) set_parameter(lm_head->own_parameters().front(), embed_tokens->weight);
    draw(*this);
  }
  // The summed loss of predicting `labels`.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& labels) {
    auto x = (*embed_tokens)(tokens);
    for (const auto& block : blocks) x = (*block)(x);
    return (*lm_head)((*norm)(x), labels);
  }
};

template <class Style, class... Options>
StylePtr style(Options&&... options) {
  return std::make_shared<Style>(std::forward<Options>(options)...);
}

// The plan of a Stack, with or without sequence parallelism.
inline ParallelPlan stack_plan(bool sequence_parallel) {
  const auto shard = Shard(1);
  const LayoutOptions rows = {.output_layout = shard, .use_local_output = false};
  ParallelPlan plan{
      {"embed_tokens", style<RowwiseParallel>(LayoutOptions{.input_layout = Replicate()})},
      {"block*.mlp", style<PrepareModuleInput>(PrepareModuleInputOptions{.input_layouts = {Replicate()},
                                                                         .desired_input_layouts = {Replicate()}})},
      {"block*.mlp.gate_proj", style<ColwiseParallel>()},
      {"block*.mlp.up_proj", style<ColwiseParallel>()},
      {"block*.mlp.down_proj", style<RowwiseParallel>()},
      {"lm_head", style<ColwiseParallel>(LayoutOptions{.output_layout = Shard(-1), .use_local_output = false})}};
  if (!sequence_parallel) return plan;
  plan.erase("block*.mlp");
  plan.update({{"embed_tokens", style<RowwiseParallel>(LayoutOptions{
                                    .input_layout = Replicate(), .output_layout = shard, .use_local_output = false})},
               {"block*.norm", style<SequenceParallelAllGatherActivation>()},
               {"block*.mlp.down_proj", style<RowwiseParallel>(rows)},
               {"norm", style<SequenceParallel>()},
               {"lm_head", style<ColwiseParallel>(LayoutOptions{
                               .input_layout = shard, .output_layout = Shard(-1), .use_local_output = false})}});
  return plan;
}

inline MeshPtr tensor_line(const WorldPtr& world) {
  return init_device_mesh(world, test_device_type(), {world->size()}, {"tp"});
}

// Tokens [rows, length] and the labels that follow them, the same on every rank.
inline std::pair<at::Tensor, at::Tensor> rows_of_text(int64_t step, int64_t rows, int64_t length, int64_t vocab) {
  auto generator = at::detail::createCPUGenerator(300 + static_cast<uint64_t>(step));
  const auto text = here(at::randint(0, vocab, {rows, length + 1}, generator, at::kLong));
  return {text.narrow(1, 0, length).contiguous(), text.narrow(1, 1, length).contiguous()};
}

// Full gradients, in the order of the parameters of `like`.
inline std::vector<at::Tensor> gradients_by_name(nn::Module& module, nn::Module& like) {
  std::vector<at::Tensor> out;
  auto all = module.named_parameters();
  for (const auto& wanted : like.named_parameters()) {
    for (const auto& named : all) {
      if (named.name != wanted.name) continue;
      const auto& gradient = named.slot->parameter.grad();
      out.push_back(gradient.defined() ? whole(gradient).clone() : at::Tensor());
    }
  }
  return out;
}

}  // namespace tessera::testing
