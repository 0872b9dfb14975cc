// Fuzz target: any bytes as a safetensors file. open() and the reading of every tensor succeed or throw Error.
#include <ATen/ATen.h>

#include <cstdint>
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/formats/safetensors/safetensors.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const tessera::fuzz::InputFile input(data, size);
  try {
    const auto file = tessera::SafetensorsFile::open(input.path());
    for (const auto& [name, entry] : file->entries()) {
      const auto tensor = file->tensor(name);
      if (tensor.nbytes() != entry.size_bytes()) std::abort();
      if (tensor.numel() > 0) tensor.to(at::kDouble).sum().item<double>();
    }
  } catch (const tessera::Error&) {
  }
  return 0;
}
