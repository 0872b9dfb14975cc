// Fuzz target: any bytes as a GGUF file that is converted to a Hugging Face folder. The folder is written completely,
// or the file is refused and no folder is left.
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/models/gguf/gguf_convert.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  set_log_level(LogLevel::kOff);
  const auto folder = fuzz::input_folder().path() / "out";
  const fuzz::InputFile file(data, size);
  try {
    gguf_to_folder(file.path(), folder);
    std::filesystem::remove_all(folder);
  } catch (const Error& error) {
    fuzz::check_message(error.what());
    if (std::filesystem::exists(folder)) std::abort();
  }
  return 0;
}
