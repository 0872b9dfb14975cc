// Tests of the decoder that all model families share, and of the parts that only some families have.
#include "tessera/models/decoder/decoder.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/base/error.h"
#include "tessera/models/families/gemma3.h"
#include "tessera/models/generation/step_rows.h"
#include "tests/models/tiny.h"
#include "tests/support/alone_on_device.h"

namespace tessera {
namespace {

using testing::here;
using testing::next_labels;
using testing::tiny_gemma3_changes;
using testing::tiny_model;
using testing::tiny_tokens;

// One configuration of each family, with a sliding window if the family supports it.
const std::vector<std::string>& family_changes() {
  static const std::vector<std::string> changes = {
      "",
      R"("tie_word_embeddings": true)",
      R"("architectures": ["MistralForCausalLM"], "sliding_window": 3)",
      R"("architectures": ["Qwen2ForCausalLM"], "use_sliding_window": true, "sliding_window": 4, "max_window_layers": 1)",
      R"("architectures": ["Qwen3ForCausalLM"], "head_dim": 6)",
      R"("architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7)",
      R"("architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 1, "mlp_only_layers": [0])",
      tiny_gemma3_changes(),
      tiny_gemma3_changes() + R"(, "attn_logit_softcapping": 1.5)"};
  return changes;
}

TEST(Families, PagedStepsGiveTheLogitsOfTheFullSequence) {
  at::NoGradGuard no_grad;
  for (const auto& changes : family_changes()) {
    auto model = tiny_model(changes);
    const auto tokens = tiny_tokens(2, 11);
    const auto whole = model->logits({.tokens = tokens});
    nn::PagedKVCache store(2, 2);
    const std::vector<int32_t> pages = {0, 1};
    const auto forward = rows_forward(*model);
    int64_t begin = 0;
    for (const int64_t step : {5, 1, 1, 4}) {
      StepRows rows;
      for (const int64_t row : {0, 1}) {
        rows.sequences.push_back({.first_row = row * step,
                                  .rows = step,
                                  .first_position = begin,
                                  .pages = std::span(pages).subspan(static_cast<size_t>(row), 1)});
        for (int64_t position = begin; position < begin + step; ++position) {
          rows.logits_rows.push_back(static_cast<int64_t>(rows.tokens.size()));
          rows.tokens.push_back(tokens[row][position].item<int64_t>());
          rows.positions.push_back(position);
        }
      }
      const auto wanted = whole.narrow(1, begin, step).cpu().reshape({2 * step, -1});
      EXPECT_TRUE(at::allclose(forward(store, rows), wanted, 1e-4, 1e-4)) << changes << begin;
      begin += step;
    }
  }
}

TEST(Families, LossSumIsTheCrossEntropyOfTheLogits) {
  for (const auto& changes : family_changes()) {
    auto model = tiny_model(changes);
    const auto tokens = tiny_tokens(3, 12), labels = next_labels(tokens);
    const auto loss = model->loss_sum({.tokens = tokens}, labels);
    const auto wanted = at::cross_entropy_loss(model->logits({.tokens = tokens}).view({-1, 37}), labels.view({-1}), {},
                                               at::Reduction::Sum, -100);
    EXPECT_NEAR(loss.item<double>(), wanted.item<double>(), 1e-3) << changes;
    loss.backward();
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad().clone());
    model->zero_grad();
    wanted.backward();
    const auto named = model->named_parameters();
    for (size_t i = 0; i < named.size(); ++i) {
      EXPECT_TRUE(at::allclose(gradients[i], named[i].slot->parameter.grad(), 1e-3, 1e-4)) << changes << named[i].name;
    }
  }
}

// One row of 17 has documents of 5, 1, 7 and 4 tokens. The loss of the row is the sum of the losses of the documents.
TEST(Families, PackedRowHasTheLossOfItsSeparateDocuments) {
  for (const auto& changes : family_changes()) {
    auto model = tiny_model(changes);
    const auto tokens = tiny_tokens(1, 17);
    auto positions = at::empty_like(tokens), ids = at::empty_like(tokens), labels = at::empty_like(tokens);
    double separately = 0;
    int64_t begin = 0, id = 4;
    for (const int64_t length : {5, 1, 7, 4}) {
      const auto document = tokens.narrow(1, begin, length);
      positions.narrow(1, begin, length).copy_(at::arange(length));
      ids.narrow(1, begin, length).fill_(id--);
      labels.narrow(1, begin, length).copy_(next_labels(document));
      separately += model->loss_sum({.tokens = document}, next_labels(document)).item<double>();
      begin += length;
    }
    const auto packed = model->loss_sum({.tokens = tokens, .positions = positions, .document_ids = ids}, labels);
    EXPECT_NEAR(packed.item<double>(), separately, 1e-3) << changes;
    const auto unaware = model->loss_sum({.tokens = tokens}, labels);
    EXPECT_GT(std::abs(unaware.item<double>() - separately), 1e-2) << changes << ": the boundaries make no difference";
  }
}

// Tensor parallel plans need this: the hooks of a rotary child run around its call with hidden states and positions,
// and the layers rotate by the child's results.
TEST(Families, RotaryChildrenAreCalledWithHiddenStatesAndPositions) {
  at::NoGradGuard no_grad;
  for (const auto& changes : family_changes()) {
    auto model = tiny_model(changes);
    auto& decoder = *dynamic_cast<DecoderForCausalLM&>(*model).model;
    const auto tokens = tiny_tokens(2, 5);
    const auto before = model->logits({.tokens = tokens});
    int calls = 0, wanted = 0;
    for (const auto& rotary : {decoder.rotary_emb, decoder.rotary_emb_local}) {
      if (!rotary) continue;
      ++wanted;
      rotary->register_forward_pre_hook([&](nn::Module&, nn::TensorRefs& inputs) {
        ASSERT_EQ(inputs.size(), 2U);
        EXPECT_EQ(inputs[0]->sizes(), (at::IntArrayRef{2, 5, 16}));
        EXPECT_TRUE(at::equal(*inputs[1], here(at::arange(5).unsqueeze(0))));
      });
      rotary->register_forward_hook([&](nn::Module&, nn::TensorRefs& outputs) {
        ASSERT_EQ(outputs.size(), 2U);
        for (auto* angles : outputs) *angles = angles->roll(1, 1);
        ++calls;
      });
    }
    EXPECT_FALSE(at::allclose(model->logits({.tokens = tokens}), before)) << changes;
    EXPECT_EQ(calls, wanted) << changes;
  }
}

TEST(Families, AttentionModuleMayBeReplacedAndComputeSomeHeads) {
  at::NoGradGuard no_grad;
  for (const auto& changes : family_changes()) {
    auto model = tiny_model(changes);
    const auto tokens = tiny_tokens(1, 6);
    const auto before = model->logits({.tokens = tokens});
    auto& layer = *dynamic_cast<DecoderForCausalLM&>(*model).model->layers->list[0];
    // The attention computes half of the heads, and a hook adds the other half, as on each of two tensor-parallel
    // ranks.
    auto& attention = *layer.self_attn;
    std::vector<at::Tensor> whole;
    for (const auto& slot : attention.named_parameters()) whole.push_back(slot.slot->parameter);
    const auto take = [&](int64_t half) {
      const auto slots = attention.named_parameters();
      for (size_t i = 0; i < slots.size(); ++i) {
        if (slots[i].name.find("norm") != std::string::npos || slots[i].name == "o_proj.bias") continue;
        nn::Module::set_parameter(*slots[i].slot, whole[i].chunk(2, slots[i].name == "o_proj.weight" ? 1 : 0)[half]);
      }
    };
    struct Both : nn::Attention {
      std::function<at::Tensor(const at::Tensor&, const nn::AttentionContext&)> run;
      Both() : Attention({.width = 2, .heads = 1, .kv_heads = 1, .head_dim = 2}, {}) {}
      at::Tensor forward(const at::Tensor& x, const nn::AttentionContext& with) override { return run(x, with); }
    };
    auto both = std::make_shared<Both>();
    const auto former = layer.self_attn;
    both->run = [&](const at::Tensor& x, const nn::AttentionContext& with) {
      take(0);
      const auto first = (*former)(x, with);
      take(1);
      return first + (*former)(x, with);
    };
    layer.replace_child("self_attn", both);
    EXPECT_TRUE(at::allclose(model->logits({.tokens = tokens}), before, 1e-4, 1e-5)) << changes;
  }
}

TEST(Gemma3, EmbeddingsAreScaledByAFactorRoundedToTheirDtype) {
  at::NoGradGuard no_grad;
  const nn::EmbeddingOptions scaled{.scale = std::sqrt(3072.0)};
  nn::Embedding embedding(5, 3072, {.dtype = at::kBFloat16}, scaled);
  embedding.weight.fill_(1.0);
  EXPECT_EQ(embedding(at::arange(5)).select(1, 0)[0].item<float>(), 55.5F) << "the root is 55.4256";
}

TEST(Gemma3, InitialNormsMultiplyByOne) {
  auto model = tiny_model(tiny_gemma3_changes());
  int norms = 0;
  for (const auto& named : model->named_parameters()) {
    if (named.slot->parameter.dim() != 1) continue;
    EXPECT_EQ(named.slot->parameter.abs().sum().item<float>(), 0.0F) << named.name;
    EXPECT_FALSE(named.slot->decay) << named.name;
    ++norms;
  }
  EXPECT_EQ(norms, 2 * 6 + 1);
}

TEST(Gemma3, ImageInputIsRefused) {
  const auto config = ModelConfig::parse(testing::tiny_config_with_images(), "t");
  EXPECT_EQ(config.eos_token_ids, (std::vector<int64_t>{1, 30}));
  auto model = make_model(config, {.device = at::kMeta});
  init_weights(*model, 5, testing::test_device());
  EXPECT_EQ(model->logits({.tokens = tiny_tokens(1, 4)}).sizes(), (at::IntArrayRef{1, 4, 37}));
  for (const int64_t image : {35, 36}) {
    try {
      model->logits({.tokens = here(at::tensor(std::vector<int64_t>{3, image, 4}).unsqueeze(0))});
      FAIL() << image;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      EXPECT_NE(std::string(error.what()).find("stands for an image"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace tessera
