// Tests of the engine that generates for many sequences: tokens, shared pages, preemption, log-probs, quantized weights
// and grammars. The results are compared with generate() and with a sequence that runs alone.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/models/generation/engine.h"
#include "tessera/models/generation/row_model.h"
#include "tessera/models/generation/text_stream.h"
#include "tessera/text/grammar/grammar_states.h"
#include "tessera/text/grammar/json_schema.h"
#include "tessera/text/grammar/token_constraint.h"
#include "tests/cli/tiny_tokenizer.h"
#include "tests/models/tiny.h"
#include "tests/support/alone_on_device.h"

namespace tessera {
namespace {

using testing::tiny_model;

std::vector<int64_t> tokens_from(int64_t seed, int64_t count) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back((seed * 31 + i * i * 7 + i * 3) % 37);
  return tokens;
}

std::shared_ptr<CausalLM> row_model(const std::string& changes,
                                    kernels::WeightFormat dtype = kernels::WeightFormat::kFloat32) {
  auto model = tiny_model(changes);
  if (testing::test_device().is_cpu()) make_row_model(*model, dtype);  // load_for_generation() does the same
  return model;
}

struct Generated {
  std::vector<int64_t> tokens;
  std::optional<Finish> finish;
  std::vector<TokenLogProbs> log_probs, prompt_log_probs;
};

GenerationRequest request_into(Generated& generated, std::vector<int64_t> prompt, int64_t count,
                               GenerationOptions options = {}) {
  options.max_new_tokens = count;
  return {
      .prompt = std::move(prompt), .options = options, .log_probs = 2, .on_token = [&generated](const NewToken& made) {
        generated.tokens.push_back(made.token);
        generated.finish = made.finish;
        if (made.log_probs) generated.log_probs.push_back(*made.log_probs);
        const auto& of_prompt = made.prompt_log_probs;
        generated.prompt_log_probs.insert(generated.prompt_log_probs.end(), of_prompt.begin(), of_prompt.end());
        return true;
      }};
}

Generated run_alone(const std::shared_ptr<CausalLM>& model, std::vector<int64_t> prompt, int64_t count,
                    EngineOptions options = {.pages = 8}, const GenerationOptions& sampling = {}) {
  Engine engine(model, options);
  Generated generated;
  engine.add(request_into(generated, std::move(prompt), count, sampling));
  while (engine.step()) {
  }
  return generated;
}

// Tokens must be equal. Log-probs must have equal bits on the CPU; on accelerators, whose libraries multiply, they may
// differ by 1e-4.
void expect_same_bits(const Generated& a, const Generated& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  ASSERT_EQ(a.log_probs.size(), b.log_probs.size());
  for (size_t i = 0; i < a.log_probs.size(); ++i) {
    EXPECT_NEAR(a.log_probs[i].chosen, b.log_probs[i].chosen, testing::on_accelerator() ? 1e-4 : 0) << "token " << i;
    if (testing::on_accelerator()) continue;
    EXPECT_EQ(a.log_probs[i].top_tokens, b.log_probs[i].top_tokens) << "token " << i;
  }
}

// One configuration for each branch of attention, MLP, norm, head and rotary angles.
const std::map<std::string, std::string>& families() {
  static const std::map<std::string, std::string> changes = {
      {"llama", R"("attention_bias": true, "mlp_bias": true)"},
      {"llama_dynamic", R"("rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.5})"},
      {"llama_tied", R"("tie_word_embeddings": true)"},
      {"mistral", R"("architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5)"},
      {"qwen2", R"("architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2")"},
      {"qwen3", R"("architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 6)"},
      {"qwen3_moe",
       R"("architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 6, "num_experts": 6,
       "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": true)"},
      {"gemma3", R"("model_type": "gemma3_text", )" + testing::tiny_gemma3_changes()}};
  return changes;
}

class Family : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { at::set_num_threads(1); }  // the models are too small for several threads
  const std::string& changes() const { return families().at(GetParam()); }
};

TEST_P(Family, EngineGivesTheTokensOfGenerate) {
  const auto plain = tiny_model(changes());
  const auto rows = row_model(changes());
  for (const int64_t length : {1, 5, 16, 33}) {
    const auto prompt = tokens_from(length, length);
    EXPECT_EQ(run_alone(rows, prompt, 24).tokens, generate(*plain, prompt, {.max_new_tokens = 24})) << length;
  }
}

TEST_P(Family, WithoutARowModelTheEngineGathersPagesAndGivesTheSameTokens) {
  const auto plain = tiny_model(changes());
  const auto prompt = tokens_from(3, 21);
  auto wide = tiny_model(changes());
  for (auto& named : wide->named_parameters(/*all=*/true)) {
    nn::Module::set_parameter(*named.slot, named.slot->parameter.to(at::kDouble));
  }
  EXPECT_EQ(run_alone(wide, prompt, 24).tokens, generate(*plain, prompt, {.max_new_tokens = 24}));
}

TEST_P(Family, SequenceIsBitwiseEqualAloneBatchedAndInPromptBlocks) {
  const auto model = row_model(changes());
  std::vector<Generated> alone, together(6);
  Engine engine(model, {.pages = 40, .max_sequences = 4, .prompt_block = 7});
  for (int64_t i = 0; i < 6; ++i) {
    const auto prompt = tokens_from(i, 3 + 7 * i);
    alone.push_back(run_alone(model, prompt, 20));
    engine.add(request_into(together[static_cast<size_t>(i)], prompt, 20));
    engine.step();  // the next sequence joins while this one runs
  }
  while (engine.step()) {
  }
  for (size_t i = 0; i < 6; ++i) expect_same_bits(together[i], alone[i]);
  EXPECT_EQ(engine.counts().pages_in_use, 0);
}

INSTANTIATE_TEST_SUITE_P(All, Family, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const auto& [name, changes] : families()) names.push_back(name);
                           return names;
                         }()),
                         [](const auto& info) { return info.param; });

TEST(Engine, SequencesShareThePagesOfACommonPrefix) {
  const auto model = row_model("");
  const auto shared = tokens_from(1, 32);
  auto first = shared, second = shared;
  first.push_back(5);
  second.push_back(6);
  const auto alone = run_alone(model, second, 10);
  Engine engine(model, {.pages = 8});
  Generated one, other, later;
  engine.add(request_into(one, first, 10));
  engine.add(request_into(other, second, 10));
  while (engine.step()) {
  }
  EXPECT_EQ(engine.counts().shared_tokens, 32) << "the second waits for the pages of the first, which came with it";
  engine.add(request_into(later, second, 10));
  while (engine.step()) {
  }
  EXPECT_EQ(engine.counts().shared_tokens, 64) << "pages outlive their sequence";
  expect_same_bits(other, alone);
  expect_same_bits(later, alone);
}

TEST(Engine, PreemptedSequencesGiveTheSameTokens) {
  const auto model = row_model("");
  std::vector<Generated> alone, together(5);
  Engine engine(model, {.pages = 5});
  for (int64_t i = 0; i < 5; ++i) {
    const auto prompt = tokens_from(i, 10 + i);
    alone.push_back(run_alone(model, prompt, 40));
    engine.add(request_into(together[static_cast<size_t>(i)], prompt, 40));
  }
  while (engine.step()) {
  }
  EXPECT_GT(engine.counts().preempted, 0);
  for (size_t i = 0; i < 5; ++i) expect_same_bits(together[i], alone[i]);
}

TEST(Engine, LongPromptIsComputedInBlocks) {
  const auto model = row_model("");
  const auto prompt = tokens_from(1, 45);
  Engine engine(model, {.pages = 4, .prompt_block = 10});
  Generated generated;
  engine.add(request_into(generated, prompt, 8));
  while (engine.step()) {
  }
  EXPECT_EQ(engine.counts().steps, 12) << "4 of the prompt alone";
  expect_same_bits(generated, run_alone(model, prompt, 8));
}

TEST(Engine, SampledTokensDependOnlyOnTheSeed) {
  const auto model = row_model("");
  const GenerationOptions sampling{.sample = true, .temperature = 1.3, .top_k = 0, .top_p = 0.9, .seed = 8};
  const auto alone = run_alone(model, tokens_from(2, 9), 30, {.pages = 8}, sampling);
  Engine engine(model, {.pages = 20});
  Generated generated, other;
  engine.add(request_into(other, tokens_from(4, 20), 30, {.sample = true, .seed = 1}));
  engine.step();
  engine.add(request_into(generated, tokens_from(2, 9), 30, sampling));
  while (engine.step()) {
  }
  expect_same_bits(generated, alone);
  EXPECT_NE(generated.tokens, run_alone(model, tokens_from(2, 9), 30).tokens);
}

TEST(Engine, ReportsFinishReasonsAndFreesCancelledSequences) {
  const auto model = row_model("");
  const auto free_run = run_alone(model, {4, 9}, 1000);
  EXPECT_EQ(free_run.tokens.size(), 62U) << "64 tokens of context";
  EXPECT_EQ(free_run.finish, Finish::kLength);
  const auto stopped = run_alone(model, {4, 9}, 1000, {.pages = 8}, {.stop_tokens = {free_run.tokens[5]}});
  EXPECT_EQ(stopped.finish, Finish::kStop);
  Engine engine(model, {.pages = 8});
  Generated generated;
  const auto id = engine.add(request_into(generated, {4, 9}, 50));
  engine.step();
  EXPECT_EQ(engine.counts().running, 1);
  engine.cancel(id);
  EXPECT_EQ(engine.counts().running, 0);
  EXPECT_EQ(engine.counts().pages_in_use, 0);
  EXPECT_FALSE(engine.step());
}

TEST(Engine, RefusesInvalidRequests) {
  Engine engine(row_model(""), {.pages = 2});
  EXPECT_THROW(engine.add({.prompt = {}}), Error);
  EXPECT_THROW(engine.add({.prompt = {37}}), Error);
  EXPECT_THROW(engine.add({.prompt = tokens_from(1, 64)}), Error);
  EXPECT_THROW(engine.add({.prompt = tokens_from(1, 30), .options = {.max_new_tokens = 4}}), Error)
      << "33 tokens and the last one, whose keys are not computed; 2 pages";
  EXPECT_NO_THROW(engine.add({.prompt = tokens_from(1, 30), .options = {.max_new_tokens = 3}}));
  while (engine.step()) {
  }
  EXPECT_THROW(engine.add({.prompt = {1}, .options = {.temperature = std::nan("")}}), Error);
  EXPECT_THROW(engine.add({.prompt = {1}, .options = {.logit_bias = {{3, std::nanf("")}}}}), Error);
  EXPECT_THROW(Engine(row_model(""), {.pages = 0}), Error);
}

TEST(Engine, LogProbsEqualTheModel) {
  const auto plain = tiny_model();
  const at::NoGradGuard no_grad;
  const auto generated = run_alone(row_model(""), {4, 9, 2}, 1);
  const auto expected = at::log_softmax(
      plain->logits({.tokens = testing::here(at::tensor({4, 9, 2}, at::kLong).unsqueeze(0))})[0][-1], -1);
  EXPECT_NEAR(generated.log_probs.at(0).chosen, expected.max().item<double>(), 1e-5);
  ASSERT_EQ(generated.log_probs[0].top_tokens.size(), 2U);
  EXPECT_EQ(generated.log_probs[0].top_tokens[0].first, generated.tokens[0]);
  EXPECT_NEAR(generated.log_probs[0].top_tokens[1].second, std::get<0>(expected.topk(2))[1].item<double>(), 1e-5);
}

TEST(Engine, LogProbsOfPromptsEqualTheModelInBlocksAndBatches) {
  const auto plain = tiny_model();
  const at::NoGradGuard no_grad;
  const auto model = row_model("");
  std::vector<Generated> generated(6);
  std::vector<std::vector<int64_t>> prompts = {{4}, {4, 9, 2}};
  for (const int64_t length : {33, 33, 33, 20}) prompts.push_back(tokens_from(1, length));  // with common pages
  Engine engine(model, {.pages = 9, .prompt_block = 7});
  for (size_t i = 0; i < 6; ++i) {
    auto request = request_into(generated[i], prompts[i], 12);
    request.prompt_log_probs = i != 3;
    engine.add(std::move(request));
  }
  while (engine.step()) {
  }
  EXPECT_GT(engine.counts().preempted, 0);
  for (size_t i = 0; i < 6; ++i) {
    expect_same_bits(generated[i], run_alone(model, prompts[i], 12));
    const auto& found = generated[i].prompt_log_probs;
    ASSERT_EQ(found.size(), i == 3 ? 0 : prompts[i].size() - 1) << i;
    const auto wanted = at::log_softmax(
        plain->logits({.tokens = testing::here(at::tensor(prompts[i], at::kLong).unsqueeze(0))})[0], -1);
    for (size_t at = 0; at < found.size(); ++at) {
      const auto row = wanted[static_cast<int64_t>(at)];
      EXPECT_NEAR(found[at].chosen, row[prompts[i][at + 1]].item<double>(), 1e-4) << i << " " << at;
      ASSERT_EQ(found[at].top_tokens.size(), 2U);
      EXPECT_EQ(found[at].top_tokens[0].first, row.argmax().item<int64_t>());
    }
  }
}

// A float32 model whose weights are rounded to the values of `dtype`.
std::shared_ptr<CausalLM> rounded_model(const std::string& changes, kernels::WeightFormat dtype) {
  auto model = tiny_model(changes);
  for (auto& named : model->named_parameters(/*all=*/true)) {
    const auto& value = named.slot->parameter;
    if (value.dim() != 2 || named.name.find("embed") != std::string::npos) continue;
    const bool head = named.name.find("lm_head") != std::string::npos;
    const auto packed = kernels::InferenceWeight::of(
        value, head && dtype == kernels::WeightFormat::kInt4 ? kernels::WeightFormat::kInt8 : dtype);
    nn::Module::set_parameter(*named.slot, packed.dequantized());
  }
  make_row_model(*model, kernels::WeightFormat::kFloat32);
  return model;
}

// A grammar for small JSON texts. Each token is one character; the last token of the vocabulary stops.
class Constrained : public ::testing::Test {
 protected:
  static constexpr int64_t kStop = 36;
  const text::Tokenizer tokenizer_ =
      text::Tokenizer::from_json(testing::character_tokenizer("{}[]\":,-.0123456789trueflasnbcdhikop #"), "test");
  const std::shared_ptr<CausalLM> model_ = row_model(families().at("llama"));

  text::Grammar grammar() const {
    static const Json schema = Json::parse(
        R"({"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "integer"}, {"enum": ["a", "bc"]}]},
            "minItems": 2, "maxItems": 6})");
    text::GrammarBuilder build;
    text::JsonParts json(build);
    const auto root = text::JsonSchema(json, JsonReader(schema, "schema")).value();
    return std::move(build).finish(root);
  }
  GenerationOptions options() const {
    const auto vocabulary = std::make_shared<const text::SortedVocabulary>(tokenizer_);
    const auto masks = std::make_shared<text::GrammarMasks>(grammar(), vocabulary);
    GenerationOptions options{.max_new_tokens = 50, .stop_tokens = {kStop}};
    options.constraint = std::make_shared<text::TokenConstraint>(masks, options.stop_tokens);
    return options;
  }
  std::string text_of(const std::vector<int64_t>& tokens) const {
    return tokenizer_.decode(std::vector<text::TokenId>(tokens.begin(), tokens.end()));
  }
};

TEST_F(Constrained, GreedyTokensAreTheMostLikelyAllowedByTheGrammar) {
  const auto plain = tiny_model(families().at("llama"));
  std::set<std::string> seen;
  for (int64_t seed = 1; seed <= 8; ++seed) {
    const auto prompt = tokens_from(seed, 5);
    text::GrammarStates states(grammar());
    std::vector<int64_t> all = prompt, expected;
    int32_t state = states.start();
    while (!(states.accepts(state) && states.ends(state)) && expected.size() < 50) {
      const auto logits =
          plain->logits({.tokens = testing::here(at::tensor(all).unsqueeze(0)), .logits_to_keep = 1}).flatten();
      int64_t best = -1;
      for (int64_t token = 0; token < 37; ++token) {
        const auto byte = static_cast<uint8_t>(tokenizer_.token_bytes(static_cast<text::TokenId>(token))[0]);
        const bool fits =
            token == kStop ? states.accepts(state) : states.next(state, byte) != text::GrammarStates::kDead;
        if (fits && (best < 0 || logits[token].item<float>() > logits[best].item<float>())) best = token;
      }
      all.push_back(best);
      expected.push_back(best);
      if (best == kStop) break;
      state = states.next(state, static_cast<uint8_t>(tokenizer_.token_bytes(static_cast<text::TokenId>(best))[0]));
    }
    EXPECT_EQ(generate(*plain, prompt, options()), expected) << seed;
    const auto generated = run_alone(model_, prompt, 50, {.pages = 8}, options());
    EXPECT_EQ(generated.tokens, expected) << seed;
    EXPECT_EQ(generated.finish, expected.size() < 50 ? Finish::kStop : Finish::kLength);
    seen.insert(text_of(expected));
  }
  EXPECT_GT(seen.size(), 1U);
}

TEST_F(Constrained, SampledTextsMatchTheGrammarWithBatchingAndPreemption) {
  Engine engine(model_, {.pages = 9, .max_sequences = 12});
  std::vector<Generated> generated(12);
  for (size_t i = 0; i < generated.size(); ++i) {
    auto sampled = i % 3 == 2 ? GenerationOptions{} : options();
    sampled.sample = true;
    sampled.top_k = 0;
    sampled.seed = i;
    engine.add(request_into(generated[i], tokens_from(static_cast<int64_t>(i), 20), 40, sampled));
  }
  while (engine.step()) {
  }
  EXPECT_GT(engine.counts().preempted, 0);
  int whole = 0;
  for (size_t i = 0; i < generated.size(); ++i) {
    if (i % 3 == 2) continue;
    text::GrammarStates states(grammar());
    int32_t state = states.start();
    for (const char byte : text_of(generated[i].tokens)) state = states.next(state, static_cast<uint8_t>(byte));
    EXPECT_NE(state, text::GrammarStates::kDead) << text_of(generated[i].tokens);
    if (generated[i].finish != Finish::kStop) continue;
    ++whole;
    const auto json = Json::parse(text_of(generated[i].tokens));
    EXPECT_GE(json.size(), 2U);
    EXPECT_LE(json.size(), 6U);
  }
  EXPECT_GT(whole, 2);
}

TEST(RowModel, QuantizedWeightsEqualTheirDequantizedValuesAndAreBatchInvariant) {
  TESSERA_CPU_ONLY("weights of models in rows are packed for the CPU's products");
  const std::string whole_blocks = R"("hidden_size": 32, "intermediate_size": 64)";
  for (const auto dtype : {kernels::WeightFormat::kBFloat16, kernels::WeightFormat::kFloat16,
                           kernels::WeightFormat::kInt8, kernels::WeightFormat::kInt4}) {
    const auto model = row_model(whole_blocks, dtype);
    const auto alone = run_alone(model, tokens_from(1, 20), 12);
    const auto expected = run_alone(rounded_model(whole_blocks, dtype), tokens_from(1, 20), 12);
    EXPECT_EQ(alone.tokens, expected.tokens);
    EXPECT_NEAR(alone.log_probs.at(0).chosen, expected.log_probs.at(0).chosen, 1e-4);
    EXPECT_NE(alone.log_probs.at(0).chosen,
              run_alone(row_model(whole_blocks), tokens_from(1, 20), 1).log_probs.at(0).chosen);
    Generated first, generated;
    Engine engine(model, {.pages = 12});
    engine.add(request_into(first, tokens_from(5, 9), 12));
    engine.add(request_into(generated, tokens_from(1, 20), 12));
    while (engine.step()) {
    }
    expect_same_bits(generated, alone);
  }
}

TEST(ChooseFromScores, PresenceAndFrequencyPenaltiesCountGeneratedTokens) {
  const auto chosen = [](double presence, double frequency) {
    std::vector<float> scores = {3, 2.5, 1};
    const std::vector<int64_t> context = {1, 1, 1, 0, 0};  // the first three tokens are the prompt
    return choose_from_scores(scores, {context, 3}, {.presence_penalty = presence, .frequency_penalty = frequency});
  };
  EXPECT_EQ(chosen(0, 0), 0);
  EXPECT_EQ(chosen(0.6, 0), 1);
  EXPECT_EQ(chosen(0, 0.24), 0) << "two times 0.24 is below the half between them";
  EXPECT_EQ(chosen(0, 0.26), 1);
}

TEST(ChooseFromScores, ExtremeTemperaturesGiveTheMostLikelyToken) {
  for (const double temperature : {1e-320, 1e-300, 1e-4}) {
    std::vector<float> scores = {-5, 30, 29.9F, -std::numeric_limits<float>::infinity()};
    const GenerationOptions options{.sample = true, .temperature = temperature, .top_k = 0, .seed = 3};
    EXPECT_EQ(choose_from_scores(scores, {}, options), 1) << temperature;
  }
  for (const bool sample : {false, true}) {
    std::vector<float> endless = {1, std::numeric_limits<float>::infinity(), 2};
    EXPECT_THROW(choose_from_scores(endless, {}, {.sample = sample}), Error);
    std::vector<float> none(3, -std::numeric_limits<float>::infinity());
    EXPECT_THROW(choose_from_scores(none, {}, {.sample = sample}), Error);
  }
}

TEST(ChooseFromScores, MinPDropsUnlikelyTokens) {
  std::set<int64_t> found;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::vector<float> scores = {std::log(0.5F), std::log(0.3F), std::log(0.2F)};
    found.insert(choose_from_scores(scores, {}, {.sample = true, .top_k = 0, .min_p = 0.5, .seed = seed}));
  }
  EXPECT_EQ(found, (std::set<int64_t>{0, 1}));
}

TEST(PagePool, PagesAreFoundByTheirFullPrefix) {
  PagePool pages(3);
  const auto first = tokens_from(1, 16), second = tokens_from(2, 16);
  const auto page = pages.allocate();
  ASSERT_TRUE(page);
  EXPECT_FALSE(pages.find(PagePool::kEmptyPrefix, first)) << "not published";
  const auto place = pages.publish(*page, PagePool::kEmptyPrefix, first);
  EXPECT_EQ(pages.find(PagePool::kEmptyPrefix, first), page);
  EXPECT_FALSE(pages.find(place, first)) << "the same tokens elsewhere";
  EXPECT_FALSE(pages.find(PagePool::kEmptyPrefix, second));
  const auto twin = pages.allocate();
  EXPECT_EQ(pages.publish(*twin, PagePool::kEmptyPrefix, first), place) << "one of two alike is found";
  pages.release(*page);
  pages.release(*page);
  EXPECT_EQ(pages.pages_in_use(), 1);
  EXPECT_EQ(pages.find(PagePool::kEmptyPrefix, first), page) << "kept while there is room";
}

TEST(PagePool, UnusedPagesAreReusedInReleaseOrder) {
  PagePool pages(2);
  const auto older = *pages.allocate(), newer = *pages.allocate();
  pages.publish(older, PagePool::kEmptyPrefix, tokens_from(1, 16));
  pages.publish(newer, PagePool::kEmptyPrefix, tokens_from(2, 16));
  EXPECT_FALSE(pages.allocate()) << "all have owners";
  pages.release(older);
  pages.release(newer);
  EXPECT_EQ(pages.allocate(), older);
  EXPECT_THROW(pages.release(newer), Error) << "nobody owns it";
  EXPECT_FALSE(pages.find(PagePool::kEmptyPrefix, tokens_from(1, 16)));
  EXPECT_EQ(pages.find(PagePool::kEmptyPrefix, tokens_from(2, 16)), newer);
}

TEST(StopStrings, AreFoundAcrossChunks) {
  const std::string text = "one two</s>three";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    for (size_t next = cut; next <= text.size(); ++next) {
      StopStrings stops({"</s>", "zzz"});
      auto out = stops.push(text.substr(0, cut));
      out += stops.push(text.substr(cut, next - cut));
      out += stops.push(text.substr(next));
      EXPECT_TRUE(stops.stopped());
      EXPECT_EQ(stops.finish(), "");
      EXPECT_EQ(out, "one two");
    }
  }
}

TEST(StopStrings, HoldBackOnlyAPossiblePrefix) {
  StopStrings stops({"abac", ""});
  EXPECT_EQ(stops.push("xab"), "x");
  EXPECT_EQ(stops.push("ab"), "ab") << "the second ab may begin it";
  EXPECT_EQ(stops.push("q"), "abq");
  EXPECT_EQ(stops.push("aba"), "");
  EXPECT_FALSE(stops.stopped());
  EXPECT_EQ(stops.finish(), "aba") << "it never came";
}

TEST(StopStrings, EarliestMatchEndsTheText) {
  StopStrings stops({"cd", "bcde"});
  EXPECT_EQ(stops.push("abcdef"), "a");
  EXPECT_TRUE(stops.stopped());
  EXPECT_EQ(stops.push("more"), "");
}

}  // namespace
}  // namespace tessera
