// Any bytes as a safetensors file: open() and every tensor either read or throw Error.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/formats/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int fd = ::memfd_create("fuzz", MFD_CLOEXEC);
  if (fd < 0 || ::write(fd, data, size) != static_cast<ssize_t>(size)) std::abort();
  try {
    const auto file = tessera::SafetensorsFile::open("/proc/self/fd/" + std::to_string(fd));
    for (const auto& [name, entry] : file->entries()) {
      const auto tensor = file->tensor(name);
      if (tensor.nbytes() != entry.size_bytes()) std::abort();
      if (tensor.numel() > 0) tensor.to(at::kDouble).sum().item<double>();
    }
  } catch (const tessera::Error&) {
  }
  ::close(fd);
  return 0;
}
