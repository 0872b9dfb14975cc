// Tests of the Llama model: tied weights, the hooks that FSDP needs, padding and wrong inputs.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/base/error.h"
#include "tessera/models/decoder/decoder.h"
#include "tests/models/tiny.h"
#include "tests/support/alone_on_device.h"

namespace tessera {
namespace {

using testing::here;
using testing::next_labels;
using testing::tiny_model;
using testing::tiny_tokens;

TEST(Llama, TiedHeadIsOneParameterInTwoSlots) {
  auto model = tiny_model(R"("tie_word_embeddings": true)");
  auto& llama = dynamic_cast<DecoderForCausalLM&>(*model);
  EXPECT_TRUE(llama.lm_head->weight.is_same(llama.model->embed_tokens->weight));
  EXPECT_EQ(model->named_parameters(true).size(), model->named_parameters().size() + 1);
  EXPECT_EQ(model->named_parameters().front().name, "model.embed_tokens.weight");
  auto untied = tiny_model();
  EXPECT_EQ(untied->named_parameters().back().name, "lm_head.weight");
}

TEST(Llama, HooksOfTheModelRunAroundEmbeddingAndHead) {
  auto model = tiny_model();
  auto& llama = dynamic_cast<DecoderForCausalLM&>(*model);
  const auto embedding = llama.model->embed_tokens->weight, head = llama.lm_head->weight;
  const auto tokens = tiny_tokens(1, 4);
  const auto logits = model->logits({.tokens = tokens});
  const auto loss = model->loss_sum({.tokens = tokens}, next_labels(tokens));
  // FSDP does the same: the model's own parameters are available only inside its hooks.
  llama.model->embed_tokens->weight = llama.lm_head->weight = at::Tensor();
  int outputs = 0;
  model->register_forward_pre_hook([&](nn::Module&, nn::TensorRefs& inputs) {
    EXPECT_GE(inputs.size(), 1U);
    llama.model->embed_tokens->weight = embedding;
    llama.lm_head->weight = head;
  });
  model->register_forward_hook([&](nn::Module&, nn::TensorRefs& results) {
    outputs += static_cast<int>(results.size());
    llama.model->embed_tokens->weight = llama.lm_head->weight = at::Tensor();
  });
  EXPECT_TRUE(at::equal(model->logits({.tokens = tokens}), logits));
  EXPECT_EQ(model->loss_sum({.tokens = tokens}, next_labels(tokens)).item<float>(), loss.item<float>());
  EXPECT_EQ(outputs, 2);
}

// The head is its own FSDP unit: its weight is available only during the head's call.
TEST(Llama, HooksOfTheHeadRunAroundLogitsAndLoss) {
  auto model = tiny_model();
  auto& llama = dynamic_cast<DecoderForCausalLM&>(*model);
  const auto tokens = tiny_tokens(2, 4), labels = next_labels(tokens);
  const auto logits = model->logits({.tokens = tokens}), loss = model->loss_sum({.tokens = tokens}, labels);
  auto& slot = llama.lm_head->own_parameters().front();
  *slot.slot = at::Tensor();
  std::vector<size_t> inputs_seen;
  llama.lm_head->register_forward_pre_hook([&](nn::Module&, nn::TensorRefs& inputs) {
    inputs_seen.push_back(inputs.size());
    *slot.slot = slot.parameter;
  });
  llama.lm_head->register_forward_hook([&](nn::Module&, nn::TensorRefs&) { *slot.slot = at::Tensor(); });
  EXPECT_TRUE(at::equal(model->logits({.tokens = tokens}), logits));
  EXPECT_EQ(model->loss_sum({.tokens = tokens}, labels).item<float>(), loss.item<float>());
  EXPECT_EQ(inputs_seen, (std::vector<size_t>{1, 2})) << "hidden states, then labels beside them";
}

// Padding behind the documents of a row changes neither loss nor gradients, for any tokens in the padding.
TEST(Llama, PaddingHasNoLossOrGradient) {
  auto model = tiny_model();
  const auto tokens = tiny_tokens(1, 9), labels = next_labels(tokens);
  const auto wanted = model->loss_sum({.tokens = tokens}, labels);
  wanted.backward();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad().clone());
  const auto pad = [](const at::Tensor& row, int64_t with) { return at::constant_pad_nd(row, {0, 5}, with); };
  model->zero_grad();
  const auto ids = here(at::zeros({1, 9}, at::kLong));
  const auto found = model->loss_sum({.tokens = pad(tokens, 3), .document_ids = pad(ids, -1)}, pad(labels, -100));
  EXPECT_NEAR(found.item<double>(), wanted.item<double>(), 1e-4);
  found.backward();
  for (size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(at::allclose(model->parameters()[i].grad(), gradients[i], 1e-4, 1e-5)) << i;
  }
}

TEST(Llama, BlocksAreCalledThroughTheirHooks) {
  auto model = tiny_model();
  std::vector<int> order;
  int number = 0;
  for (const auto& block : model->blocks()) {
    block->register_forward_pre_hook([&order, number](nn::Module&, nn::TensorRefs& inputs) {
      EXPECT_EQ(inputs.size(), 1U) << "the hidden states alone";
      order.push_back(number);
    });
    ++number;
  }
  model->logits({.tokens = tiny_tokens(1, 4)});
  EXPECT_EQ(order, (std::vector<int>{0, 1}));
}

TEST(Llama, WrongInputsAreErrors) {
  auto model = tiny_model();
  EXPECT_THROW(model->logits({}), Error);
  EXPECT_THROW(model->logits({.tokens = here(at::zeros({1, 3}))}), Error);
  EXPECT_THROW(model->loss_sum({.tokens = tiny_tokens(1, 4)}, here(at::zeros({1, 3}, at::kLong))), Error);
}

}  // namespace
}  // namespace tessera
