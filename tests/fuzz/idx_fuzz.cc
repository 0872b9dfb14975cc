// Fuzz target: any bytes as a pair of Megatron's files. The first two bytes give the length of the index; the ids
// follow the index.
#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/data/records/megatron.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  if (size < 2) return 0;
  const size_t index_bytes = std::min<size_t>(size_t{data[0]} * 4 + data[1] % 4, size - 2);
  const auto& folder = fuzz::input_folder();
  folder.put("fuzz.idx", fuzz::text_of(data + 2, index_bytes));
  folder.put("fuzz.bin", fuzz::text_of(data + 2 + index_bytes, size - 2 - index_bytes));
  try {
    const auto index = data::MegatronIndex::open(folder.path() / "fuzz.idx");
    for (int64_t i = 0; i < index.documents(); ++i) {
      for (const int32_t id : index.document(i)) {
        if (id < 0) std::abort();
      }
    }
  } catch (const Error& error) {
    fuzz::check_message(error.what());
  }
  return 0;
}
