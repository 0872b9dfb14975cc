// A model that generates one fixed text for every prompt: each token determines the next token. After a line end the
// text is "abc<|im_end|>", then the same text again, so that a missed end is visible in the text. Its tokens are the
// bytes and five more.
//
//   write_chain_folder(dir, {.generation_config = R"({"eos_token_id": 260})"});
//   write_chain_gguf(file, {.eos = kChainEos, .turn_end_type = 4});
#pragma once

#include <ATen/ATen.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/files/file.h"
#include "tessera/formats/gguf/gguf_writer.h"
#include "tessera/formats/safetensors/safetensors_writer.h"

namespace tessera::testing {

constexpr int64_t kChainWidth = 272;  // number of tokens, and hidden size
constexpr int32_t kChainBos = 256, kChainEos = 257, kChainTurnStart = 258, kChainTurnEnd = 260;

inline const char* const kChainTemplate =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

// The tokens by id: GPT-2's letters of the bytes, then the other tokens.
inline std::vector<std::string> chain_tokens() {
  std::vector<std::string> tokens;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    const int letter = printable ? byte : next++;
    if (letter < 0x80) {
      tokens.push_back({static_cast<char>(letter)});
    } else {
      tokens.push_back({static_cast<char>(0xc0 | letter >> 6), static_cast<char>(0x80 | (letter & 0x3f))});
    }
  }
  for (const char* more : {"<s>", "</s>", "<|im_start|>", "<tool>", "<|im_end|>"}) tokens.push_back(more);
  return tokens;
}

struct ChainTensor {
  const char* name;
  const char* gguf_name;
  at::Tensor value;
};

inline std::vector<ChainTensor> chain_tensors() {
  constexpr int64_t kInner = 32;
  auto head = at::zeros({kChainWidth, kChainWidth});
  const auto follow = [&](int64_t token, int64_t next) { head[next][token] = 1; };
  for (int64_t token = 0; token < kChainWidth; ++token) follow(token, 'a');
  head['a']['a'] = head['a']['b'] = head['a']['c'] = 0;
  follow('a', 'b');
  follow('b', 'c');
  follow('c', kChainTurnEnd);
  const auto none = [](int64_t rows, int64_t columns) { return at::zeros({rows, columns}); };
  return {{"model.embed_tokens.weight", "token_embd.weight", at::eye(kChainWidth)},
          {"model.norm.weight", "output_norm.weight", at::ones({kChainWidth})},
          {"lm_head.weight", "output.weight", head},
          {"model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight", at::ones({kChainWidth})},
          {"model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight", at::ones({kChainWidth})},
          {"model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", none(kChainWidth, kChainWidth)},
          {"model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight", none(kChainWidth, kChainWidth)},
          {"model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight", none(kChainWidth, kChainWidth)},
          {"model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight", none(kChainWidth, kChainWidth)},
          {"model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight", none(kInner, kChainWidth)},
          {"model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight", none(kInner, kChainWidth)},
          {"model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight", none(kChainWidth, kInner)}};
}

struct ChainFolder {
  std::string tokenizer_config = R"({"bos_token": "<s>", "eos_token": "</s>"})";
  std::string generation_config{};  // "": there is no such file
  std::string config_eos = "257";   // eos_token_id in config.json
  std::function<void(nlohmann::ordered_json& tokenizer)> change_tokenizer = {};
  std::string chat_template = kChainTemplate;
};

inline nlohmann::ordered_json chain_tokenizer() {
  using Json = nlohmann::ordered_json;
  const auto tokens = chain_tokens();
  Json vocab = Json::object(), added = Json::array();
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (id < 256) vocab[tokens[id]] = id;
    if (id < 256) continue;
    added.push_back({{"id", id},
                     {"content", tokens[id]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", tokens[id] != "<tool>"}});
  }
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"vocab", vocab},
            {"merges", Json::array()}}}};
}

inline void write_chain_folder(const std::filesystem::path& dir, const ChainFolder& of = {}) {
  std::filesystem::create_directories(dir);
  publish_file(dir / "config.json", R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 272,
    "hidden_size": 272, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "rms_norm_eps": 1e-05, "torch_dtype": "float32",
    "tie_word_embeddings": false, "bos_token_id": 256, "eos_token_id": )" +
                                        of.config_eos + "}");
  if (!of.generation_config.empty()) publish_file(dir / "generation_config.json", of.generation_config);
  auto tokenizer = chain_tokenizer();
  if (of.change_tokenizer) of.change_tokenizer(tokenizer);
  publish_file(dir / "tokenizer.json", tokenizer.dump());
  publish_file(dir / "tokenizer_config.json", of.tokenizer_config);
  if (!of.chat_template.empty()) publish_file(dir / "chat_template.jinja", of.chat_template);
  std::vector<SafetensorsSpec> specs;
  for (const auto& tensor : chain_tensors()) specs.push_back({tensor.name, at::kFloat, tensor.value.sizes().vec()});
  SafetensorsFolderWriter writer(dir, specs);
  for (const auto& tensor : chain_tensors()) writer.write(tensor.name, tensor.value);
  writer.finish();
}

struct ChainGguf {
  std::optional<uint32_t> eos = kChainEos, eot{};
  int32_t turn_end_type = 3;  // type of <|im_end|>: 1 text, 3 control, 4 user-defined
  std::optional<std::string> pre = "gpt-2";
  std::vector<std::string> merges{};
  std::vector<std::string> more_tokens{};  // after the other tokens
};

inline void write_chain_gguf(const std::filesystem::path& path, const ChainGguf& of = {}) {
  GgufWriter writer(path);
  const auto number = [&](const std::string& key, uint32_t value) { writer.set(key, value); };
  writer.set("general.architecture", std::string("llama"));
  number("llama.context_length", 256);
  number("llama.embedding_length", kChainWidth);
  number("llama.block_count", 1);
  number("llama.feed_forward_length", 32);
  number("llama.attention.head_count", 4);
  number("llama.attention.head_count_kv", 4);
  number("llama.rope.dimension_count", kChainWidth / 4);
  writer.set("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  auto tokens = chain_tokens();
  std::vector<int32_t> types(tokens.size(), 1);
  for (const auto id : {kChainBos, kChainEos, kChainTurnStart}) types[static_cast<size_t>(id)] = 3;
  types[259] = 4;
  types[kChainTurnEnd] = of.turn_end_type;
  for (const auto& token : of.more_tokens) tokens.push_back(token), types.push_back(1);
  while (tokens.size() < kChainWidth) {
    tokens.push_back("[PAD" + std::to_string(tokens.size()) + "]");
    types.push_back(5);
  }
  writer.set("tokenizer.ggml.model", std::string("gpt2"));
  if (of.pre) writer.set("tokenizer.ggml.pre", *of.pre);
  writer.set("tokenizer.ggml.tokens", GgufArray{tokens});
  writer.set("tokenizer.ggml.token_type", GgufArray{types});
  writer.set("tokenizer.ggml.merges", GgufArray{of.merges});
  number("tokenizer.ggml.bos_token_id", kChainBos);
  if (of.eos) number("tokenizer.ggml.eos_token_id", *of.eos);
  if (of.eot) number("tokenizer.ggml.eot_token_id", *of.eot);
  writer.set("tokenizer.ggml.add_bos_token", false);
  writer.set("tokenizer.chat_template", std::string(kChainTemplate));
  for (const auto& tensor : chain_tensors()) {
    writer.announce(tensor.gguf_name, GgmlType::kF32, tensor.value.sizes().vec());
  }
  for (const auto& tensor : chain_tensors()) writer.write(tensor.gguf_name, tensor.value);
  writer.finish();
}

}  // namespace tessera::testing
