// Fuzz target: any bytes as `.metadata` of DCP. Metadata that is read is written and reads back equal.
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/formats/torch/dcp_metadata.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  for (const bool allow_gaps : {false, true}) {
    try {
      const DcpParseOptions options{.allow_gaps = allow_gaps};
      const auto metadata = DcpMetadata::parse(fuzz::text_of(data, size), "fuzz", options);
      if (DcpMetadata::parse(metadata.dump(options), "again", options) != metadata) std::abort();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kFormat) std::abort();
      fuzz::check_message(error.what());
    }
  }
  return 0;
}
