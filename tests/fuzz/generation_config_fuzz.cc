// Fuzz target: any bytes as generation_config.json.
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/models/generation/generate.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  set_log_level(LogLevel::kOff);
  static const auto config = ModelConfig::parse(R"({"model_type": "llama"})", "fuzz");
  const auto& folder = fuzz::input_folder();
  folder.put("generation_config.json", fuzz::text_of(data, size));
  try {
    GenerationOptions::from_folder(folder.path(), config).check();
  } catch (const Error& error) {
    fuzz::check_message(error.what());
  }
  return 0;
}
