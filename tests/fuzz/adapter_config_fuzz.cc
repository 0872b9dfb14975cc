// Fuzz target: any bytes as PEFT's adapter_config.json. The settings and target_modules are read and applied to a small
// model, or refused.
#include "tessera/base/error.h"
#include "tessera/models/adapters/adapters.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  static const auto config = ModelConfig::parse(
      R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 8,
      "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2})",
      "fuzz");
  const auto& folder = fuzz::input_folder();
  folder.put("adapter_config.json", fuzz::text_of(data, size));
  try {
    const auto adapters = read_adapter_config(folder.path());
    const auto model = make_model(config, {.device = c10::Device(c10::kMeta)});
    add_adapters(*model, adapters);
  } catch (const Error& error) {
    fuzz::check_message(error.what());
  }
  return 0;
}
