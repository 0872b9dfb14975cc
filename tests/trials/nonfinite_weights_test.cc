// Tests of weights with NaN or infinity: every reader stops and names the first such tensor.
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/write_dcp.h"
#include "tessera/cli/ckpt/ckpt_convert.h"
#include "tessera/cli/ckpt/ckpt_files.h"
#include "tessera/formats/gguf/gguf.h"
#include "tessera/formats/safetensors/safetensors.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/generation/load.h"
#include "tessera/models/gguf/gguf_convert.h"
#include "tessera/nn/linear/quantized_linear.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/formats/file_bytes.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "tests/trials/nonfinite_models.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::spoil;
using testing::write_changed;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
const std::string kDown = "model.layers.1.mlp.down_proj.weight";

void convert(const fs::path& from, const fs::path& out, const std::string& to, const std::string& dtype = "") {
  cli::convert_checkpoint(from, out, {.to = to, .dtype = dtype, .config = {}, .adapter = {}});
}

void load_as(const fs::path& dir, const std::string& dtype) { load_for_generation(dir, dtype, at::kCPU); }

class NonfiniteWeights : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto config = ModelConfig::parse(
        R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "initializer_range": 0.1, "torch_dtype": "float32", "rms_norm_eps": 1e-05,
        "tie_word_embeddings": false, "bos_token_id": 258, "eos_token_id": 258})",
        "tiny");
    const auto model = make_model(config, {.device = at::kMeta});
    init_weights(*model, 5);
    save_pretrained(*model, good(), {});
    data::make_byte_tokenizer(good());
    auto tokenizer = nlohmann::json::parse(read_file(good() / "tokenizer.json"));
    tokenizer["pre_tokenizer"] = nlohmann::json::parse(
        R"({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]})");  // GGUF has it
    publish_file(good() / "tokenizer.json", tokenizer.dump());
  }
  fs::path good() const { return folder_ / "good"; }
  // A damaged copy of the folder, under a new name for each call.
  fs::path changed(const testing::ChangeTensor& change, uint64_t max_shard_bytes = 5'000'000'000) {
    const auto path = folder_ / fmt::format("changed-{}", ++folders_);
    write_changed(good(), path, change, max_shard_bytes);
    return path;
  }
  // Expects that the errors of verify, the loaders and the conversions all name the tensor.
  static void expect_named(const fs::path& path, const std::string& name, const std::string& value) {
    const auto says = HasSubstr(fmt::format("tensor '{}' holds values that are not finite: {} at [", name, value));
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { cli::verify_checkpoint(path); }), says);
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { from_pretrained(path); }), says);
    const auto out = path.string() + "-out";
    for (const std::string to : {"hf", "dcp"}) {
      EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { convert(path, out, to); }), says) << to;
      EXPECT_FALSE(fs::exists(out)) << to;
    }
  }

  testing::TempFolder folder_;
  int folders_ = 0;
};

TEST_F(NonfiniteWeights, AreReportedForEachTensorByEveryReader) {
  const auto files = TensorFiles::open(good());
  ASSERT_EQ(files->tensors().size(), 21U);
  for (const auto& [name, stored] : files->tensors()) {
    SCOPED_TRACE(name);
    expect_named(changed(spoil(name, kNan)), name, "nan");
  }
}

TEST_F(NonfiniteWeights, AreReportedInEachDtypeAndInShards) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const double value : {kNan, kInfinity, -kInfinity}) {
      SCOPED_TRACE(fmt::format("{} in {}", value, c10::toString(dtype)));
      expect_named(changed(spoil(kDown, value, dtype)), kDown, value > 0 ? "inf" : value < 0 ? "-inf" : "nan");
    }
  }
  const auto shards = changed(spoil(kDown, kNan), 20'000);
  ASSERT_GT(TensorFiles::open(shards)->tensors().size(), 1U);
  ASSERT_TRUE(fs::exists(shards / "model.safetensors.index.json"));
  expect_named(shards, kDown, "nan");
}

TEST_F(NonfiniteWeights, OverflowInTheRequestedDtypeIsReported) {
  const auto large = changed(spoil(kDown, 1e6));
  const auto says = AllOf(HasSubstr("tensor '" + kDown + "' holds 1000000 at [31, 63], beyond the range of float16"),
                          HasSubstr("Take bfloat16"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { load_as(large, "float16"); }), says);
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { from_pretrained(large, at::kHalf); }), says);
  EXPECT_NO_THROW(load_as(large, "bfloat16"));
  EXPECT_NO_THROW(load_as(large, "int8"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { load_as(large, "int4"); }), HasSubstr("model.layers.1.mlp"));
  const auto out = folder_ / "out";
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { convert(large, out, "hf", "float16"); }), says);
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { convert(large, out, "gguf", "float16"); }), says);
  EXPECT_NO_THROW(convert(large, out, "gguf", "q8_0"));
  const auto larger = changed(spoil(kDown, 1e30));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { convert(larger, folder_ / "other", "gguf", "q8_0"); }),
              AllOf(HasSubstr(kDown), HasSubstr("beyond the range of q8_0")));
}

TEST_F(NonfiniteWeights, AreNotWrittenToAGgufFileOfAnyType) {
  for (const double value : {kNan, kInfinity}) {
    const auto path = changed(spoil(kDown, value));
    for (const std::string dtype : {"", "f32", "bf16", "q8_0"}) {
      EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { convert(path, folder_ / "out.gguf", "gguf", dtype); }),
                  HasSubstr("tensor '" + kDown + "' holds values that are not finite"))
          << dtype;
      EXPECT_FALSE(fs::exists(folder_ / "out.gguf"));
    }
  }
}

// Writes the bits of NaN into the first value of the tensor, or into the scale of its first block.
void spoil_gguf(const fs::path& path, const std::string& name) {
  const auto info = GgufFile::open(path)->tensor_info(name);
  const uint16_t bits = info.type == GgmlType::kBF16 ? 0x7FC0 : 0x7E00;
  auto bytes = read_file(path);
  const size_t place = info.begin + (info.type == GgmlType::kF32 ? 2 : 0);
  const uint16_t in_file = info.type == GgmlType::kF32 ? 0x7FC0 : bits;
  std::memcpy(bytes.data() + place, &in_file, sizeof in_file);
  publish_file(path, bytes);
}

TEST_F(NonfiniteWeights, AreReportedInGgufFilesThatAreDecodedOrKeptQuantized) {
  const std::string name = "blk.1.ffn_down.weight";
  const auto says = HasSubstr("tensor '" + name + "' holds values that are not finite: nan at [0, ");
  for (const std::string dtype : {"f32", "f16", "bf16", "q8_0"}) {
    SCOPED_TRACE(dtype);
    const auto file = folder_ / (dtype + ".gguf");
    cli::convert_checkpoint(good(), file, {.to = "gguf", .dtype = dtype});
    const auto load_packed = [&] {
      const auto model = make_model(ModelConfig::from_folder(good()), {.device = at::kMeta});
      nn::quantize_linears(*model, {.format = nn::Quantization::kGguf});
      load_pretrained(*model, file);
    };
    const auto load_decoded = [&] {
      const auto model = make_model(ModelConfig::from_folder(good()), {.device = at::kMeta});
      load_pretrained(*model, file);
    };
    EXPECT_NO_THROW(load_decoded());
    EXPECT_NO_THROW(load_packed());
    spoil_gguf(file, name);
    EXPECT_THAT(error_of(ErrorKind::kFormat, load_decoded), says);
    EXPECT_THAT(error_of(ErrorKind::kFormat, load_packed), says);
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { cli::verify_checkpoint(file); }), says);
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { convert(file, folder_ / "out", "hf"); }), says);
    EXPECT_FALSE(fs::exists(folder_ / "out"));
  }
}

TEST_F(NonfiniteWeights, AreReportedInAQuantizedBaseModel) {
  const auto path = changed(spoil(kDown, kNan));
  const auto load = [&] {
    const auto model = make_model(ModelConfig::from_folder(path), {.device = at::kMeta});
    nn::quantize_linears(*model, {.format = nn::Quantization::kNf4});
    load_pretrained(*model, path);
  };
  EXPECT_THAT(error_of(ErrorKind::kFormat, load), HasSubstr("tensor '" + kDown + "' holds values that are not finite"));
  for (const std::string dtype : {"int8", "int4", "bfloat16"}) {
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { load_as(path, dtype); }), HasSubstr(kDown)) << dtype;
  }
}

TEST_F(NonfiniteWeights, AreReportedInDistributedCheckpointsAndOptimizerStates) {
  const auto spoilt = [&](const std::string& name) {
    const auto path = changed([&](const std::string& each, const at::Tensor& value) {
      return each == name ? at::full_like(value, kNan) : value;
    });
    // The form of a run's checkpoint: weights under "model.", the optimizer state beside them.
    const auto dcp = path.string() + "-dcp";
    write_dcp(*TensorFiles::open(path), dcp, {.ranks = 2, .prefix = name == kDown ? "model." : "optim.state."});
    return dcp;
  };
  const auto weights = spoilt(kDown), states = spoilt("model.norm.weight");
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { cli::verify_checkpoint(weights); }),
              HasSubstr("tensor 'model." + kDown + "' holds values that are not finite: nan at [0, 0], 2048 of 2048"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { cli::verify_checkpoint(states); }),
              HasSubstr("tensor 'optim.state.model.norm.weight' holds values that are not finite"));
  const auto load = [&] {
    const auto model = make_model(ModelConfig::from_folder(good()), {.device = at::kMeta});
    load_pretrained(*model, weights);
  };
  EXPECT_THAT(error_of(ErrorKind::kFormat, load), HasSubstr("tensor '" + kDown + "' holds values that are not finite"));
  for (const std::string to : {"hf", "torch"}) {
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { convert(weights, folder_ / "out", to); }),
                HasSubstr(kDown + "' holds values that are not finite"));
    EXPECT_FALSE(fs::exists(folder_ / "out"));
  }
}

// Element [5, 1] of the tensor becomes NaN.
void spoil_adapters(const fs::path& path, const std::string& name) {
  const auto file = SafetensorsFile::open(path);
  std::vector<SafetensorsSpec> specs;
  std::map<std::string, at::Tensor> values;
  for (const auto& [each, entry] : file->entries()) {
    values[each] = file->tensor(each).clone();
    specs.push_back({each, entry.dtype, entry.shape});
  }
  values.at(name)[5][1] = kNan;
  SafetensorsWriter writer(path, specs);
  for (const auto& spec : specs) writer.write(spec.name, values.at(spec.name));
  writer.finish();
}

TEST_F(NonfiniteWeights, AreReportedInAdaptersByLoadersMergesAndVerify) {
  const auto model = from_pretrained(good());
  add_adapters(*model, {.rank = 2, .target_modules = {"q_proj"}});
  init_adapters(*model, 3);
  const auto adapter = folder_ / "adapter";
  save_adapters(*model, adapter);
  {
    const at::NoGradGuard no_grad;
    adapted_linears(*model).back().second->lora_B->weight[5][1] = kNan;
  }
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { save_adapters(*model, folder_ / "never"); }),
              HasSubstr("nan at [5, 1]"));
  EXPECT_FALSE(fs::exists(folder_ / "never"));
  spoil_adapters(adapter / "adapter_model.safetensors",
                 "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight");
  const std::string says =
      "tensor 'base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight' holds values that are not finite: nan "
      "at [5, 1]";
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { load_adapters(*model, adapter); }), HasSubstr(says));
  EXPECT_THAT(
      error_of(
          ErrorKind::kFormat,
          [&] { cli::convert_checkpoint(good(), folder_ / "merged", {.to = "hf", .dtype = "", .adapter = adapter}); }),
      HasSubstr(says));
  const auto run = testing::run_process({testing::program(), "ckpt", "verify", adapter.string()});
  EXPECT_EQ(run.exit_code, 3) << run.out;
  EXPECT_THAT(run.err, HasSubstr(says));
}

TEST_F(NonfiniteWeights, AreNeverSaved) {
  const auto model = from_pretrained(good());
  {
    const at::NoGradGuard no_grad;
    model->parameters().back().view(-1)[3] = kInfinity;
  }
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { save_pretrained(*model, folder_ / "saved", good()); }),
              HasSubstr("holds values that are not finite: inf at [0, 3]"));
  EXPECT_FALSE(fs::exists(folder_ / "saved"));
}

TEST_F(NonfiniteWeights, EveryVerbExitsWithThreeAndNamesTheTensor) {
  const auto path = changed(spoil(kDown, kNan, at::kBFloat16)).string();
  publish_file(folder_ / "in.jsonl", R"({"text": "a text of some tokens"})"
                                     "\n");
  publish_file(folder_ / "recipe.yaml",
               fmt::format("model: {{path: {}}}\ndata: {{train: [{}], format: jsonl, sequence_length: 16}}\n"
                           "train: {{steps: 1, global_batch_size: 1, local_batch_size: 1}}\n",
                           path, (folder_ / "in.jsonl").string()));
  const auto recipe = (folder_ / "recipe.yaml").string(), run_dir = "checkpoint.dir=" + (folder_ / "run").string();
  const std::vector<std::vector<std::string>> verbs = {
      {"generate", "--model", path, "--prompt", "a"},
      {"generate", "--model", path, "--prompt", "a", "--dtype", "int8"},
      {"score", "--model", path, "--input", (folder_ / "in.jsonl").string()},
      {"serve", "--model", path, "--port", "0"},
      {"train", recipe, run_dir},
      {"train", recipe, run_dir, "train.on_nonfinite=skip", "lora.rank=2", "lora.quantize=nf4"},
      {"ckpt", "verify", path},
      {"ckpt", "convert", path, (folder_ / "out").string(), "--to", "dcp"},
  };
  for (const auto& verb : verbs) {
    std::vector<std::string> all = {testing::program()};
    all.insert(all.end(), verb.begin(), verb.end());
    const auto run = testing::run_process(all, {.timeout_seconds = 30});
    EXPECT_EQ(run.exit_code, 3) << fmt::format("{}", fmt::join(verb, " ")) << "\n" << run.err;
    EXPECT_THAT(run.err, HasSubstr("tensor '" + kDown + "' holds values that are not finite: nan at [31, 63]"));
    EXPECT_EQ(run.out, "");
  }
}

}  // namespace
}  // namespace tessera
