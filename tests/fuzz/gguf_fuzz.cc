// Any bytes as a GGUF file: open() and every tensor either read or throw Error.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/formats/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int fd = ::memfd_create("fuzz", MFD_CLOEXEC);
  if (fd < 0 || ::write(fd, data, size) != static_cast<ssize_t>(size)) std::abort();
  try {
    const auto file = tessera::GgufFile::open("/proc/self/fd/" + std::to_string(fd));
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
  ::close(fd);
  return 0;
}
