// Tests of the conversion between Hugging Face folders and GGUF files in both directions: tensors, experts, tokenizers,
// dtypes and refused input.
#include "tessera/models/gguf/gguf_convert.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/formats/gguf/gguf_writer.h"
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/models/config/config.h"
#include "tessera/models/config/family.h"
#include "tessera/models/families/families.h"
#include "tessera/models/files/model_path.h"
#include "tessera/models/files/weights.h"
#include "tessera/models/gguf/gguf_rope.h"
#include "tessera/models/gguf/gguf_tensors.h"
#include "tests/formats/file_bytes.h"
#include "tests/models/stored_tensors.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TempFolder;

json gguf_config() {
  return {
      {"model_type", "llama"},  {"hidden_size", 64},        {"intermediate_size", 96},       {"num_hidden_layers", 2},
      {"vocab_size", 40},       {"num_attention_heads", 4}, {"num_key_value_heads", 2},      {"rms_norm_eps", 1e-5},
      {"rope_theta", 500000.0}, {"attention_bias", true},   {"max_position_embeddings", 128}};
}

json tiny_tokenizer() {
  json vocab = json::object();
  for (int i = 0; i < 26; ++i) vocab[std::string(1, static_cast<char>('a' + i))] = i;
  vocab["ab"] = 26;
  vocab["abc"] = 27;
  json added = json::array();
  const auto add = [&](int id, const char* content, bool special) {
    added.push_back({{"id", id},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", special}});
  };
  add(28, "<end>", true);
  add(29, "<tool>", false);
  return {{"added_tokens", added},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Digits"}, {"individual_digits", true}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}}}}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"a b", json::array({"ab", "c"})}}}}};
}

// Writes a complete tiny Hugging Face folder with random weights. A test then overwrites the files that it wants to
// change.
fs::path write_tiny(const fs::path& dir, c10::ScalarType dtype = at::kFloat,
                    std::optional<c10::ScalarType> of_layers = std::nullopt) {
  fs::create_directories(dir);
  publish_file(dir / "config.json", gguf_config().dump());
  publish_file(dir / "tokenizer.json", tiny_tokenizer().dump());
  publish_file(dir / "tokenizer_config.json",
               json{{"eos_token", {{"content", "<end>"}}}, {"chat_template", "{{ x }}"}}.dump());
  std::vector<SafetensorsSpec> specs;
  const auto config = ModelConfig::parse(gguf_config().dump(), "tiny");
  for (const auto& tensor : gguf_tensors(llama_family().gguf, config)) {
    specs.push_back({tensor.hf_name,
                     tensor.hf_name.find(".layers.") == std::string::npos ? dtype : of_layers.value_or(dtype),
                     tensor.shape});
  }
  SafetensorsFolderWriter writer(dir, specs);
  for (const auto& spec : specs) writer.write(spec.name, at::randn(spec.shape).to(spec.dtype));
  writer.finish();
  return dir;
}

std::vector<std::string> names_in(const fs::path& dir) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

TEST(GgufConvert, RotaryRowsInterleaveTheHalvesOfEachHeadAndSplitBack) {
  const auto rows = at::arange(8, at::kFloat);  // a bias: two heads of four rows
  EXPECT_TRUE(at::equal(interleave_rotary_rows(rows, 2), at::tensor({0.F, 2.F, 1.F, 3.F, 4.F, 6.F, 5.F, 7.F})));
  const auto weight = at::randn({24, 5});
  const auto interleaved = interleave_rotary_rows(weight, 3);
  EXPECT_TRUE(at::equal(interleaved[1], weight[4]));   // row 1 of head 0 is row 0 of its second half
  EXPECT_TRUE(at::equal(interleaved[10], weight[9]));  // row 2 of head 1 is row 1 of its first half
  EXPECT_TRUE(at::equal(split_rotary_rows(interleaved, 3), weight));
}

TEST(GgufConvert, Llama3ScalingIsRecoveredFromItsDivisors) {
  for (const double factor : {8., 32., 2.5}) {
    for (const int64_t context : {8192, 4096, 512}) {
      for (const int64_t head_dim : {64, 128}) {
        RopeConfig wanted;
        wanted.kind = RopeKind::kLlama3;
        wanted.theta = 500000;
        wanted.factor = factor;
        wanted.original_max_position_embeddings = context;
        const auto found = recover_llama3_scaling(llama3_divisors(wanted, head_dim), wanted.theta);
        ASSERT_TRUE(found);
        EXPECT_EQ(found->factor, factor);
        EXPECT_EQ(found->original_max_position_embeddings, context);
      }
    }
  }
  EXPECT_FALSE(recover_llama3_scaling({1, 7, 3, 8}, 10000));
  EXPECT_FALSE(recover_llama3_scaling({}, 10000));
}

TEST(GgufConvert, FolderToGgufAndBackKeepsEveryTensorBitwise) {
  for (const auto& [type, dtype, name] :
       {std::tuple(GgmlType::kF32, at::kFloat, "float32"), std::tuple(GgmlType::kBF16, at::kBFloat16, "bfloat16")}) {
    TempFolder folder;
    const auto dir = write_tiny(folder / "hf", dtype);
    folder_to_gguf(dir, folder / "m.gguf", {.type = type});
    gguf_to_folder(folder / "m.gguf", folder / "back");
    EXPECT_THAT(names_in(folder / "back"),
                ElementsAre("config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json",
                            "tokenizer.json", "tokenizer_config.json"));
    const auto before = SafetensorsFolder::open(dir), after = SafetensorsFolder::open(folder / "back");
    ASSERT_EQ(before.files().size(), after.files().size());
    for (const auto& [tensor, file] : before.files()) {
      EXPECT_TRUE(at::equal(before.tensor(tensor), after.tensor(tensor))) << tensor;
    }
    const auto config = json::parse(read_file(folder / "back" / "config.json"));
    const auto wanted = gguf_config();
    for (const auto& [key, value] : wanted.items()) EXPECT_EQ(config.at(key), value) << key;
    EXPECT_EQ(config.at("torch_dtype"), name);
    EXPECT_EQ(config.at("eos_token_id"), 28);
    EXPECT_EQ(config.at("head_dim"), 16);
    EXPECT_EQ(config.at("tie_word_embeddings"), false);
  }
}

json moe_config() {
  auto config = gguf_config();
  config.update({{"model_type", "qwen3_moe"},
                 {"attention_bias", false},
                 {"head_dim", 16},
                 {"num_experts", 3},
                 {"num_experts_per_tok", 2},
                 {"moe_intermediate_size", 32},
                 {"norm_topk_prob", true}});
  return config;
}

// Experts are stored one by one, as transformers saves them, or stacked, as transformers holds them in memory.
fs::path write_moe(const fs::path& dir, bool stacked, const json& config_json = moe_config()) {
  write_tiny(dir);
  fs::remove(dir / "model.safetensors");
  publish_file(dir / "config.json", config_json.dump());
  const auto config = ModelConfig::parse(config_json.dump(), "moe");
  std::map<std::string, at::Tensor> values;
  at::manual_seed(5);
  for (const auto& tensor : gguf_tensors(find_family_of_gguf("qwen3moe")->gguf, config)) {
    const auto mlp = tensor.hf_name.find(".mlp.");
    if (mlp != std::string::npos && !config.has_experts(tensor.hf_name[mlp - 1] - '0')) {
      const auto prefix = tensor.hf_name.substr(0, mlp);
      values[prefix + ".mlp.gate_proj.weight"] = values[prefix + ".mlp.up_proj.weight"] = at::randn({96, 64});
      values[prefix + ".mlp.down_proj.weight"] = at::randn({64, 96});
      continue;
    }
    if (tensor.stacks == nullptr) values[tensor.hf_name] = at::randn(tensor.shape);
    if (tensor.stacks == nullptr || tensor.first_row > 0) continue;
    const auto stack = at::randn({tensor.shape[0], tensor.stack_rows, tensor.shape[2]});
    if (stacked) {
      values[tensor.hf_name] = stack;
      continue;
    }
    for (int64_t expert = 0; expert < stack.size(0); ++expert) {
      const auto name = fmt::format("{}.{}.", tensor.hf_name.substr(0, tensor.hf_name.rfind('.')), expert);
      if (tensor.hf_name.ends_with("down_proj")) {
        values[name + "down_proj.weight"] = stack[expert];
      } else {
        values[name + "gate_proj.weight"] = stack[expert].narrow(0, 0, 32);
        values[name + "up_proj.weight"] = stack[expert].narrow(0, 32, 32);
      }
    }
  }
  testing::store_tensors(dir, values);
  return dir;
}

TEST(GgufConvert, ExpertsAreStackedUnderLlamaCppsNames) {
  TempFolder folder;
  const auto apart = write_moe(folder / "apart", false), stacked = write_moe(folder / "stacked", true);
  const auto before = SafetensorsFolder::open(apart);
  for (const auto& dir : {apart, stacked}) {
    const auto gguf = dir.string() + ".gguf", back = dir.string() + "-back";
    folder_to_gguf(dir, gguf, {.type = GgmlType::kF32});
    const auto file = GgufFile::open(gguf);
    EXPECT_EQ(file->find_string("general.architecture"), "qwen3moe");
    EXPECT_EQ(file->find_uint("qwen3moe.expert_count"), 3U);
    EXPECT_EQ(file->find_uint("qwen3moe.expert_used_count"), 2U);
    EXPECT_EQ(file->find_uint("qwen3moe.expert_feed_forward_length"), 32U);
    EXPECT_THAT(file->tensor_info("blk.1.ffn_up_exps.weight").shape, ElementsAre(3, 32, 64));
    EXPECT_THAT(file->tensor_info("blk.1.ffn_down_exps.weight").shape, ElementsAre(3, 64, 32));
    EXPECT_TRUE(file->tensor("blk.1.ffn_up_exps.weight")[2].equal(
        before.tensor("model.layers.1.mlp.experts.2.up_proj.weight")));
    gguf_to_folder(gguf, back);
    const auto after = SafetensorsFolder::open(back);
    ASSERT_EQ(after.files().size(), before.files().size());
    for (const auto& [name, unused] : before.files()) {
      EXPECT_TRUE(after.tensor(name).equal(before.tensor(name))) << name;
    }
    const auto config = json::parse(read_file(fs::path(back) / "config.json"));
    const auto wanted = moe_config();
    for (const auto& [key, value] : wanted.items()) EXPECT_EQ(config.at(key), value) << key;
  }
  // Routers stay F32 when other matrices are F16. If F16 would lose precision of a router, the folder's dtype is F32.
  folder_to_gguf(apart, folder / "half.gguf", {.type = GgmlType::kF16});
  EXPECT_EQ(GgufFile::open(folder / "half.gguf")->tensor_info("blk.0.ffn_gate_inp.weight").type_name(), "F32");
  EXPECT_EQ(GgufFile::open(folder / "half.gguf")->tensor_info("blk.0.ffn_down_exps.weight").type_name(), "F16");
  folder_to_gguf(apart, folder / "full.gguf");
  EXPECT_EQ(GgufFile::open(folder / "full.gguf")->tensor_info("blk.0.ffn_down_exps.weight").type_name(), "F32");
  gguf_to_folder(folder / "half.gguf", folder / "half");
  EXPECT_EQ(SafetensorsFolder::open(folder / "half").entry("lm_head.weight").dtype, at::kFloat);
}

TEST(GgufConvert, LinkedFolderLoadsTheModelOfTheFile) {
  TempFolder folder;
  folder_to_gguf(write_tiny(folder / "hf"), folder / "m.gguf", {.type = GgmlType::kQ8_0});
  gguf_to_folder(folder / "m.gguf", folder / "converted");
  gguf_to_linked_folder(folder / "m.gguf", folder / "linked");
  auto names = names_in(folder / "converted");
  std::replace(names.begin(), names.end(), std::string("model.safetensors"), std::string(kLinkedGguf));
  EXPECT_EQ(names_in(folder / "linked"), names);
  for (const char* same : {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}) {
    EXPECT_EQ(read_file(folder / "linked" / same), read_file(folder / "converted" / same)) << same;
  }
  const auto linked = from_pretrained(folder / "linked"), converted = from_pretrained(folder / "converted");
  const auto wanted = converted->named_parameters();
  for (const auto& [name, slot, module] : linked->named_parameters()) {
    const auto same = std::ranges::find_if(wanted, [&](const auto& other) { return other.name == name; });
    ASSERT_NE(same, wanted.end()) << name;
    EXPECT_TRUE(at::equal(slot->parameter, same->slot->parameter)) << name;
  }
  fs::remove(folder / "m.gguf");
  EXPECT_ANY_THROW(from_pretrained(folder / "linked"));
}

// A user gives the path of the file. The other files of the model folder are written once, in the cache.
TEST(GgufConvert, GgufPathResolvesToAModelFolder) {
  TempFolder folder;
  const char* before = std::getenv("XDG_CACHE_HOME");
  const std::string cache = before ? before : "";
  ::setenv("XDG_CACHE_HOME", (folder / "cache").c_str(), 1);
  folder_to_gguf(write_tiny(folder / "hf"), folder / "m.gguf", {.type = GgmlType::kF16});
  const fs::path found = resolve_model_path(folder / "m.gguf", "model.path");
  EXPECT_EQ(from_pretrained(found)->config().vocab_size, gguf_config()["vocab_size"]);
  const auto made = fs::last_write_time(found / "config.json");
  EXPECT_EQ(resolve_model_path(folder / "m.gguf", "model.path"), found);
  EXPECT_EQ(fs::last_write_time(found / "config.json"), made);
  fs::last_write_time(folder / "m.gguf", fs::last_write_time(folder / "m.gguf") + std::chrono::seconds(1));
  EXPECT_NE(resolve_model_path(folder / "m.gguf", "model.path"), found) << "it may be another model now";
  testing::write_bytes(folder / "bad.gguf", "GGUF");
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { resolve_model_path(folder / "bad.gguf", "model.path"); }),
              HasSubstr("bad.gguf"));
  cache.empty() ? ::unsetenv("XDG_CACHE_HOME") : ::setenv("XDG_CACHE_HOME", cache.c_str(), 1);
}

TEST(GgufConvert, ExpertSettingsThatLlamaCppLacksAreRefused) {
  TempFolder folder;
  const auto refuse = [&](const char* key, const json& value, const char* message) {
    auto config = moe_config();
    config[key] = value;
    const auto dir = write_moe(folder / key, true, config);
    EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { folder_to_gguf(dir, folder / "m.gguf"); }), HasSubstr(message));
  };
  refuse("norm_topk_prob", false, "always normalises");
  // These folders have dense layers. The error must name the config key, not the tensors of the dense layers.
  refuse("mlp_only_layers", {1}, "layers without experts (mlp_only_layers, decoder_sparse_step)");
  refuse("decoder_sparse_step", 2, "layers without experts (mlp_only_layers, decoder_sparse_step)");
  EXPECT_FALSE(fs::exists(folder / "m.gguf"));
  const auto good = write_moe(folder / "good", false);
  folder_to_gguf(good, folder / "good.gguf");
  auto bytes = read_file(folder / "good.gguf");
  const std::string key = "qwen3moe.expert_count";
  bytes.replace(bytes.find(key), key.size(), "qwen3moe.expert_coumt");
  testing::write_bytes(folder / "bad.gguf", bytes);
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { gguf_to_folder(folder / "bad.gguf", folder / "out"); }),
              HasSubstr("expert_count is 0"));
  EXPECT_FALSE(fs::exists(folder / "out"));
}

TEST(GgufConvert, AddedTokensAreWrittenUpToTheRowsOfTheModel) {
  TempFolder folder;
  const auto dir = write_tiny(folder / "hf");
  auto names = json::array();
  for (int i = 30; i < 42; ++i) names.push_back("<new" + std::to_string(i) + ">");
  publish_file(dir / "tokenizer_config.json", json{{"eos_token", "<end>"}, {"extra_special_tokens", names}}.dump());
  folder_to_gguf(dir, folder / "m.gguf");
  const auto file = GgufFile::open(folder / "m.gguf");
  const auto& tokens = *file->find_strings("tokenizer.ggml.tokens");
  ASSERT_EQ(tokens.size(), 40U) << "the rows of the model";
  EXPECT_EQ(tokens[29], "<tool>");
  EXPECT_EQ(tokens[30], "<new30>");
  EXPECT_EQ(tokens[39], "<new39>");
  EXPECT_EQ(file->find_ints("tokenizer.ggml.token_type")->at(30), 3) << "control";
}

TEST(GgufConvert, TokenizerRoundTrips) {
  TempFolder folder;
  folder_to_gguf(write_tiny(folder / "hf"), folder / "m.gguf");
  const auto file = GgufFile::open(folder / "m.gguf");
  EXPECT_EQ(file->find_string("tokenizer.ggml.pre"), "smollm");
  EXPECT_EQ(file->find_strings("tokenizer.ggml.tokens")->at(30), "[PAD30]");  // the tokens are padded up to the 40 rows
  EXPECT_EQ(file->find_ints("tokenizer.ggml.token_type")->at(28), 3);
  EXPECT_EQ(file->find_ints("tokenizer.ggml.token_type")->at(29), 4);
  EXPECT_EQ(file->find_uint("tokenizer.ggml.eos_token_id"), 28U);
  gguf_to_folder(folder / "m.gguf", folder / "back");
  const auto tokenizer = json::parse(read_file(folder / "back" / "tokenizer.json"));
  EXPECT_EQ(tokenizer.at("model").at("vocab"), tiny_tokenizer().at("model").at("vocab"));
  EXPECT_EQ(tokenizer.at("model").at("merges"), json::parse(R"([["a","b"],["ab","c"]])"));
  EXPECT_EQ(tokenizer.at("added_tokens").at(1).at("content"), "<tool>");
  EXPECT_EQ(tokenizer.at("added_tokens").at(1).at("special"), false);
  EXPECT_EQ(tokenizer.at("pre_tokenizer"), tiny_tokenizer().at("pre_tokenizer"));
  EXPECT_EQ(json::parse(read_file(folder / "back" / "tokenizer_config.json")).at("chat_template"), "{{ x }}");
}

TEST(GgufConvert, DtypesAreChosenAsDocumented) {
  TempFolder folder;
  const auto half = write_tiny(folder / "bf16", at::kBFloat16), full = write_tiny(folder / "f32");
  folder_to_gguf(half, folder / "bf16.gguf");
  folder_to_gguf(full, folder / "f32.gguf");
  folder_to_gguf(full, folder / "q8.gguf", {.type = GgmlType::kQ8_0});
  EXPECT_EQ(GgufFile::open(folder / "bf16.gguf")->tensor_info("output.weight").type_name(), "BF16");
  EXPECT_EQ(GgufFile::open(folder / "f32.gguf")->tensor_info("output.weight").type_name(), "F32");
  EXPECT_EQ(GgufFile::open(folder / "f32.gguf")->find_uint("general.file_type"), 0U);
  folder_to_gguf(full, folder / "asked.gguf", {.type = GgmlType::kF16});
  EXPECT_EQ(GgufFile::open(folder / "asked.gguf")->tensor_info("output.weight").type_name(), "F16");
  folder_to_gguf(write_tiny(folder / "f16", at::kHalf), folder / "f16.gguf");
  EXPECT_EQ(GgufFile::open(folder / "f16.gguf")->tensor_info("output.weight").type_name(), "F16");
  folder_to_gguf(write_tiny(folder / "f64", at::kDouble), folder / "f64.gguf");
  EXPECT_EQ(GgufFile::open(folder / "f64.gguf")->tensor_info("output.weight").type_name(), "F32");
  folder_to_gguf(write_tiny(folder / "mixed", at::kHalf, at::kBFloat16), folder / "mixed.gguf");
  EXPECT_EQ(GgufFile::open(folder / "mixed.gguf")->tensor_info("output.weight").type_name(), "F32") << "loses nothing";
  const auto quantised = GgufFile::open(folder / "q8.gguf");
  EXPECT_EQ(quantised->tensor_info("blk.1.ffn_down.weight").type_name(), "Q8_0");
  EXPECT_EQ(quantised->tensor_info("blk.1.attn_q.bias").type_name(), "F32");
  gguf_to_folder(folder / "q8.gguf", folder / "a");
  gguf_to_folder(folder / "q8.gguf", folder / "b", {.dtype = at::kHalf, .max_shard_bytes = 20000});
  const auto a = SafetensorsFolder::open(folder / "a"), b = SafetensorsFolder::open(folder / "b");
  EXPECT_EQ(a.entry("lm_head.weight").dtype, at::kFloat);
  EXPECT_EQ(b.entry("lm_head.weight").dtype, at::kHalf);
  EXPECT_TRUE(fs::exists(folder / "b" / "model.safetensors.index.json"));
  const auto original = SafetensorsFolder::open(full).tensor("model.layers.1.self_attn.q_proj.weight");
  const auto error = (a.tensor("model.layers.1.self_attn.q_proj.weight") - original).abs().max().item<float>();
  EXPECT_GT(error, 0);
  EXPECT_LT(error, original.abs().max().item<float>() / 127);
}

TEST(GgufConvert, RefusedInputLeavesNoFiles) {
  const auto refuse = [](ErrorKind kind, const char* message, const std::function<void(const fs::path&)>& damage) {
    SCOPED_TRACE(message);
    TempFolder folder;
    const auto dir = write_tiny(folder / "hf");
    damage(dir);
    EXPECT_THAT(error_of(kind, [&] { folder_to_gguf(dir, folder / "m.gguf"); }), HasSubstr(message));
    EXPECT_THAT(names_in(folder.path()), ElementsAre("hf"));
  };
  const auto with_config = [](const char* key, json value) {
    return [=](const fs::path& dir) {
      auto config = gguf_config();
      config[key] = value;
      publish_file(dir / "config.json", config.dump());
    };
  };
  const auto with_tokenizer = [](const char* pointer, json value) {
    return [=](const fs::path& dir) {
      auto tokenizer = tiny_tokenizer();
      tokenizer[json::json_pointer(pointer)] = value;
      publish_file(dir / "tokenizer.json", tokenizer.dump());
    };
  };
  refuse(ErrorKind::kFormat, "architecture 'mamba' is not supported", with_config("model_type", "mamba"));
  refuse(ErrorKind::kConfig, "Gemma3ForConditionalGeneration cannot be written", with_config("model_type", "gemma3"));
  refuse(ErrorKind::kConfig, "hidden_act is not silu", with_config("hidden_act", "gelu_pytorch_tanh"));
  refuse(ErrorKind::kConfig, "hidden_size: found -1, wanted an integer", with_config("hidden_size", -1));
  refuse(ErrorKind::kShape, "model wants [40, 128]", with_config("hidden_size", 128));
  refuse(ErrorKind::kConfig, "num_attention_heads: found 0", with_config("num_attention_heads", 0));
  refuse(ErrorKind::kConfig, "num_hidden_layers: found 100000", with_config("num_hidden_layers", 100000));
  refuse(ErrorKind::kFormat, "model.layers.2.self_attn.q_proj.weight is missing", with_config("num_hidden_layers", 3));
  refuse(ErrorKind::kFormat, "model.layers.1.input_layernorm.weight is unexpected",
         with_config("num_hidden_layers", 1));
  // The head of write_tiny() differs from its embedding.
  refuse(ErrorKind::kFormat, "model.embed_tokens.weight and lm_head.weight are one parameter",
         with_config("tie_word_embeddings", true));
  refuse(ErrorKind::kConfig, "rope type 'longrope'", with_config("rope_scaling", {{"rope_type", "longrope"}}));
  refuse(ErrorKind::kFormat, "has the id 40", with_tokenizer("/model/vocab/zz", 40));
  refuse(ErrorKind::kFormat, "has the id -1", with_tokenizer("/model/vocab/zz", -1));
  refuse(ErrorKind::kFormat, "have the same id", with_tokenizer("/model/vocab/zz", 3));
  refuse(ErrorKind::kFormat, "is not a merge of two tokens", with_tokenizer("/model/merges/0", "ab"));
  refuse(ErrorKind::kConfig, "no counterpart", with_tokenizer("/pre_tokenizer/pretokenizers/0/type", "Whitespace"));
  refuse(ErrorKind::kConfig, "only BPE", with_tokenizer("/model/type", "Unigram"));
  refuse(ErrorKind::kFormat, "no valid JSON", [](const fs::path& dir) { publish_file(dir / "tokenizer.json", "[1"); });
  for (const char* name : {"config.json", "tokenizer.json", "tokenizer_config.json"}) {
    refuse(ErrorKind::kFormat, "nested deeper",
           [&](const fs::path& dir) { publish_file(dir / name, std::string(100'000, '[')); });
  }
  refuse(ErrorKind::kIo, "holds no config.json", [](const fs::path& dir) { fs::remove(dir / "config.json"); });
}

// A folder may store the embedding, the head or both of a tied pair. The GGUF file is the same.
TEST(GgufConvert, ATiedHeadMayBeStoredTwiceOrInPlaceOfTheEmbedding) {
  TempFolder folder;
  auto config = gguf_config();
  config["tie_word_embeddings"] = true;
  std::string first;
  for (const std::string stored : {"model.embed_tokens.weight", "lm_head.weight", "both"}) {
    SCOPED_TRACE(stored);
    const auto dir = write_tiny(folder / stored);
    publish_file(dir / "config.json", config.dump());
    auto values = testing::stored_tensors(first.empty() ? dir : folder / "model.embed_tokens.weight");
    const auto embedding = values.at("model.embed_tokens.weight");
    values["lm_head.weight"] = embedding;
    if (stored != "both") values.erase(stored == "lm_head.weight" ? "model.embed_tokens.weight" : "lm_head.weight");
    testing::store_tensors(dir, values);
    folder_to_gguf(dir, folder / (stored + ".gguf"), {.type = GgmlType::kF32});
    const auto file = GgufFile::open(folder / (stored + ".gguf"));
    EXPECT_FALSE(file->tensors().contains("output.weight"));
    EXPECT_TRUE(file->tensor("token_embd.weight").equal(embedding));
    first = stored;
  }
}

TEST(GgufConvert, NamesWithoutTheBaseModelsPrefixGiveTheSameFile) {
  TempFolder folder;
  for (const auto& dir :
       {write_tiny(folder / "tiny"), write_moe(folder / "apart", false), write_moe(folder / "stacked", true)}) {
    const auto whole = dir.string() + ".gguf", base = dir.string() + "-base.gguf";
    folder_to_gguf(dir, whole);
    std::map<std::string, at::Tensor> values;
    for (const auto& [name, value] : testing::stored_tensors(dir)) {
      values[name.starts_with("model.") ? name.substr(6) : name] = value;
    }
    testing::store_tensors(dir, values);
    folder_to_gguf(dir, base);
    EXPECT_EQ(read_file(base), read_file(whole));
  }
}

TEST(GgufConvert, DamagedGgufFilesAreRefusedAndLeaveNoFolder) {
  TempFolder folder;
  folder_to_gguf(write_tiny(folder / "hf"), folder / "m.gguf", {.type = GgmlType::kQ8_0});
  const auto bytes = read_file(folder / "m.gguf");
  const auto convert = [&](const std::string& changed) {
    testing::write_bytes(folder / "bad.gguf", changed);
    gguf_to_folder(folder / "bad.gguf", folder / "out");
  };
  const auto replaced = [&](std::string from, const std::string& to) {
    auto changed = bytes;
    const auto at = changed.find(from);
    EXPECT_NE(at, std::string::npos);
    return changed.replace(at, from.size(), to);
  };
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { convert(replaced("llama", "mambo")); }), HasSubstr("'mambo'"));
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { convert(replaced("smollm", "smollx")); }), HasSubstr("'smollx'"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { convert(replaced("abc", "abd")); }), HasSubstr("merge 'ab c'"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { convert(replaced("blk.1.ffn_up.weight", "blk.7.ffn_up.weight")); }),
              HasSubstr("no tensor 'blk.1.ffn_up.weight'"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { convert(bytes.substr(0, bytes.size() - 4096)); }),
              HasSubstr("cut off"));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("bad.gguf", "hf", "m.gguf"));

  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const size_t header_bytes = GgufFile::open(folder / "m.gguf")->tensor_info("token_embd.weight").begin;
  for (int flip = 0; flip < 100; ++flip) {
    auto changed = bytes;
    changed[random() % header_bytes] = static_cast<char>(random());
    try {
      convert(changed);
      fs::remove_all(folder / "out");
    } catch (const Error& error) {
      ASSERT_TRUE(error.exit_code() == 3 || error.exit_code() == 2) << error.what();
    }
    ASSERT_THAT(names_in(folder.path()), ElementsAre("bad.gguf", "hf", "m.gguf"));
  }
}

TEST(GgufConvert, DestinationsThatExistAreKept) {
  TempFolder folder;
  const auto dir = write_tiny(folder / "hf");
  folder_to_gguf(dir, folder / "m.gguf");
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { folder_to_gguf(dir, folder / "m.gguf"); }), HasSubstr("exists already"));
  const auto before = read_file(dir / "config.json");
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { gguf_to_folder(folder / "m.gguf", dir); }), HasSubstr("exists already"));
  EXPECT_EQ(read_file(dir / "config.json"), before);
}

}  // namespace
}  // namespace tessera
