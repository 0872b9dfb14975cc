// Fuzz target: any bytes as a JSON array of records, or as gzip of such an array.
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/data/records/record.h"
#include "tessera/data/records/row_source.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  const fuzz::InputFile file(data, size);
  try {
    const auto rows = data::open_json_array(file.path());
    data::RecordReader reader("jsonl", {});
    for (data::RecordRow row; rows->next(row);) {
      if (!row.value.is_object()) std::abort();
      reader.read(row);
    }
  } catch (const Error& error) {
    fuzz::check_message(error.what());
  }
  return 0;
}
