// Fuzz target: any bytes as model.safetensors.index.json beside one shard.
#include <ATen/ATen.h>

#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto& folder = tessera::fuzz::input_folder();
  static const bool once = [&] {
    const std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    folder.put("a.safetensors", bytes + header + std::string(4, '\0'));
    return true;
  }();
  static_cast<void>(once);
  folder.put("model.safetensors.index.json", tessera::fuzz::text_of(data, size));
  try {
    const auto opened = tessera::SafetensorsFolder::open(folder.path());
    for (const auto& [name, file] : opened.files()) {
      if (file->tensor(name).numel() != 1) std::abort();
    }
  } catch (const tessera::Error& error) {
    tessera::fuzz::check_message(error.what());
  }
  return 0;
}
