// Fuzz target: any bytes as a checkpoint's manifest. A manifest that is read is written and reads back equal.
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/checkpoint/manifest.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using tessera::Manifest;
  try {
    const auto manifest = Manifest::parse(std::string(tessera::fuzz::text_of(data, size)), "fuzz");
    const auto written = manifest.dump();
    if (Manifest::parse(written, "again").dump() != written) std::abort();
  } catch (const tessera::Error& error) {
    tessera::fuzz::check_message(error.what());
  }
  return 0;
}
