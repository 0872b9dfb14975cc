// Tests of every family against transformers: tiny random models, with every branch of their configurations.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/models/config/family.h"
#include "tessera/models/generation/engine.h"
#include "tessera/nn/experts/router_statistics.h"
#include "tests/models/tiny.h"
#include "tests/support/alone_on_device.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::here;
using testing::run_python;

constexpr const char* kVariants = "tests/models/oracle/variants.py";
constexpr int kVariantCount = 54;

std::vector<int64_t> ids_of(const at::Tensor& tensor) {
  const auto row = tensor.contiguous();
  return {row.const_data_ptr<int64_t>(), row.const_data_ptr<int64_t>() + row.numel()};
}

// Logits and the loss are compared within 1e-5, each gradient within 1e-4 of its largest element.
void expect_values_of_transformers(CausalLM& model, const SafetensorsFile& expected) {
  const auto tokens = here(expected.tensor("tokens")).clone();
  {
    at::NoGradGuard no_grad;
    EXPECT_LT((model.logits({.tokens = tokens}).cpu() - expected.tensor("logits")).abs().max().item<double>(), 1e-5);
  }
  if (model.config().experts.adds_balance_loss) nn::router_statistics(model)->begin();
  const auto loss = model.loss_sum({.tokens = tokens}, testing::next_labels(tokens));
  EXPECT_NEAR(loss.item<double>() / expected.tensor("loss").item<double>(), 1.0, 1e-5);
  if (model.config().experts.adds_balance_loss) {
    auto& statistics = *nn::router_statistics(model);
    statistics.finish(statistics.sums());
    EXPECT_NEAR(statistics.loss().item<double>() / expected.tensor("balance").item<double>(), 1.0, 1e-5);
  }
  loss.backward();
  for (const auto& named : model.named_parameters()) {
    const auto& found = named.slot->parameter.grad();
    const auto wanted = expected.tensor("grad:" + named.name);
    ASSERT_TRUE(found.defined()) << named.name;
    EXPECT_LT((found.cpu() - wanted).abs().max().item<double>(), 1e-4 * wanted.abs().max().item<double>())
        << named.name;
  }
}

// Continues the first tokens of the first row, token by token through pages, with the prompt in two parts.
void expect_continuation_of_transformers(CausalLM& model, const SafetensorsFile& expected) {
  auto wanted = ids_of(expected.tensor("continuation"));
  const auto row = ids_of(expected.tensor("tokens")[0]);
  const std::vector<int64_t> prompt(row.begin(), row.begin() + 9);
  const auto room = static_cast<size_t>(model.config().max_position_embeddings) - prompt.size();
  if (wanted.size() > room) wanted.resize(room);
  GenerationOptions options;
  options.max_new_tokens = static_cast<int64_t>(wanted.size());
  EXPECT_EQ(generate(model, prompt, options), wanted);

  Engine engine(model.config(), rows_forward(model), testing::test_device(), {.pages = 1, .prompt_block = 4});
  std::vector<int64_t> first;
  engine.add({.prompt = prompt, .options = {.max_new_tokens = 1}, .on_token = [&](const NewToken& made) {
                first.push_back(made.token);
                return true;
              }});
  while (engine.step()) {
  }
  EXPECT_EQ(first, (std::vector<int64_t>{wanted.front()}));
}

// The saved folder has the tensors that the model does not own, under the same names and byte for byte.
int expect_foreign_tensors_unchanged(const fs::path& source, const fs::path& saved, const CausalLM& model) {
  const auto before = SafetensorsFolder::open(source), after = SafetensorsFolder::open(saved);
  EXPECT_EQ(before.files().size(), after.files().size());
  const auto& map = family_of(model.config().architecture).weights;
  int foreign = 0;
  for (const auto& [name, file] : before.files()) {
    if (!map.is_unowned(name)) continue;
    ++foreign;
    const auto a = before.tensor(name).contiguous(), b = after.tensor(name).contiguous();
    const bool same = a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes();
    EXPECT_TRUE(same && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0) << name;
  }
  return foreign;
}

TEST(FamiliesOracle, TinyVariantsEqualTransformersAfterLoadAndSave) {
  testing::TempFolder folder;
  const auto made = run_python(kVariants, {"make", folder.path().string()}, {.timeout_seconds = 600});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  int variants = 0, with_foreign = 0;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    SCOPED_TRACE(entry.path().filename().string());
    const auto model = from_pretrained(entry.path(), std::nullopt, testing::test_device());
    const auto expected = SafetensorsFile::open(entry.path() / "expected.safetensors");
    expect_values_of_transformers(*model, *expected);
    expect_continuation_of_transformers(*model, *expected);
    save_pretrained(*model, entry.path() / "saved", entry.path());
    if (expect_foreign_tensors_unchanged(entry.path(), entry.path() / "saved", *model) > 20) ++with_foreign;
    ++variants;
  }
  EXPECT_EQ(variants, kVariantCount);
  EXPECT_EQ(with_foreign, 2);
  const auto same = run_python(kVariants, {"same", folder.path().string()}, {.timeout_seconds = 600});
  EXPECT_EQ(same.exit_code, 0) << same.err;
  EXPECT_EQ(same.out, std::to_string(kVariantCount) + "\n");
}

}  // namespace
}  // namespace tessera
