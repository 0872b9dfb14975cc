// Tiny models in folders. Their weights are damaged, or are finite and overflow during computation.
#pragma once

#include <ATen/ATen.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "tessera/base/files/file.h"
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tests/cli/tiny_tokenizer.h"
#include "tests/models/tiny.h"

namespace tessera::testing {

inline const std::string kTrialCharacters = "abcdefghijklmnopqrstuvwxyz .{}[]\":,1_";
constexpr int64_t kOverflowingToken = 25;  // 'z'

inline std::string untied() { return R"("tie_word_embeddings": false, "max_position_embeddings": 4096)"; }

// A Llama of two layers with finite weights. Its values are finite until the first 'z': at this token the first MLP
// squares 1e20; no other token causes this.
inline std::shared_ptr<CausalLM> overflowing_model() {
  auto model = tiny_model(untied());
  const at::NoGradGuard no_grad;
  constexpr double kLarge = 1e20;
  for (auto& named : model->named_parameters()) {
    auto& value = named.slot->parameter;
    if (named.name == "model.embed_tokens.weight") {
      value.select(1, 0).zero_();
      value[kOverflowingToken][0] = 4;
    } else if (named.name == "model.layers.0.self_attn.o_proj.weight") {
      value[0].zero_();
    } else if (named.name == "model.layers.0.mlp.gate_proj.weight" ||
               named.name == "model.layers.0.mlp.up_proj.weight") {
      value.select(1, 0).fill_(kLarge);
    }
  }
  return model;
}

// Changes a copy of each tensor before the tensor is written.
using ChangeTensor = std::function<at::Tensor(const std::string& name, const at::Tensor& value)>;

// Writes a folder like `from` with changed tensors, in shards of at most `max_shard_bytes`.
inline void write_changed(const std::filesystem::path& from, const std::filesystem::path& to,
                          const ChangeTensor& change, uint64_t max_shard_bytes = 5'000'000'000) {
  const auto folder = SafetensorsFolder::open(from);
  std::filesystem::create_directories(to);
  std::map<std::string, at::Tensor> values;
  std::vector<SafetensorsSpec> specs;
  for (const auto& [name, file] : folder.files()) {
    values[name] = change(name, folder.tensor(name).clone()).contiguous();
    specs.push_back({name, values[name].scalar_type(), values[name].sizes().vec()});
  }
  SafetensorsFolderWriter writer(to, specs, {.max_shard_bytes = max_shard_bytes});
  for (const auto& spec : specs) writer.write(spec.name, values[spec.name]);
  writer.finish();
  for (const auto& entry : std::filesystem::directory_iterator(from)) {
    const auto name = entry.path().filename();
    if (!name.string().starts_with("model") && !std::filesystem::exists(to / name)) {
      std::filesystem::copy_file(entry.path(), to / name);
    }
  }
}

// Writes `value` into the last element of the tensor `name`. All tensors get the dtype.
inline ChangeTensor spoil(const std::string& name, double value, at::ScalarType dtype = at::kFloat) {
  return [=](const std::string& each, const at::Tensor& tensor) {
    auto changed = tensor.to(at::kDouble);
    if (each == name) changed.view(-1)[-1] = value;
    return changed.to(dtype);
  };
}

// Writes config, tokenizer, chat template and weights.
inline void write_model(CausalLM& model, const std::filesystem::path& dir) {
  save_pretrained(model, dir, {});
  publish_file(dir / "tokenizer.json", character_tokenizer(kTrialCharacters));
  publish_file(dir / "chat_template.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}");
}

}  // namespace tessera::testing
