// Fuzz target: any bytes as a GGUF file. open() and the reading of every tensor succeed or throw Error.
#include <ATen/ATen.h>

#include <cstdint>
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/formats/gguf/gguf.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const tessera::fuzz::InputFile input(data, size);
  try {
    const auto file = tessera::GgufFile::open(input.path());
    for (const auto& [name, info] : file->tensors()) {
      if (info.end > size || info.begin > info.end) std::abort();
      if (tessera::ggml_type_info(static_cast<uint32_t>(info.type))->decodes) {
        file->tensor(name).to(at::kFloat).sum().item<float>();
      }
    }
    for (const auto& [key, value] : file->metadata()) {
      if (std::holds_alternative<std::string>(value)) file->find_string(key);
    }
  } catch (const tessera::Error&) {
  }
  return 0;
}
