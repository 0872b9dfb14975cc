// Fuzz target: any bytes as a model's config.json. The file is refused with a clean message of one line, or is read; a
// read config is written and reads back equal.
#include <ATen/ATen.h>

#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/models/config/config.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto config = tessera::ModelConfig::parse(tessera::fuzz::text_of(data, size), "fuzz");
    const auto written = config.to_json(at::kFloat);
    if (tessera::ModelConfig::parse(written, "again").to_json(at::kFloat) != written) std::abort();
  } catch (const tessera::Error& error) {
    tessera::fuzz::check_message(error.what());
  }
  return 0;
}
