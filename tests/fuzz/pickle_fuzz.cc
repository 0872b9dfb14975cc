// Fuzz target: any bytes as a pickle. A value that is read is written in both protocols and reads back equal.
#include <cstdlib>
#include <span>

#include "tessera/base/error.h"
#include "tessera/formats/torch/pickler.h"
#include "tessera/formats/torch/unpickler.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  const PickleLimits limits{.max_expanded = 1 << 16, .max_expanded_per_byte = 16};
  try {
    const auto value = unpickle(std::as_bytes(std::span(data, size)), "fuzz", limits);
    fuzz::check_message(value.describe());
    for (const int protocol : {2, 4}) {
      const auto written = pickle(value, {.protocol = protocol});
      const auto again = unpickle(std::as_bytes(std::span(written)), "again");
      if (!is_same_pickle(value, again) || pickle(again, {.protocol = protocol}) != written) std::abort();
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kFormat) std::abort();
    fuzz::check_message(error.what());
  }
  return 0;
}
