// Fuzz target: any bytes as a flight record. A record that is read is written and reads back equal.
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/comm/watch/flight_record.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera::comm;
  try {
    const auto written = to_json(parse_flight_record(tessera::fuzz::text_of(data, size), "fuzz"));
    if (to_json(parse_flight_record(written, "again")) != written) std::abort();
  } catch (const tessera::Error&) {
  }
  return 0;
}
