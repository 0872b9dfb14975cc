#include "tessera/state/detail/cpu_memory.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>

#include "tessera/base/error.h"
#include "tessera/base/log.h"

namespace tessera::detail {
namespace {

// Returns a function of the CUDA runtime that libtorch has loaded, or null. Looking the symbol up at run time lets one
// build work with and without CUDA.
template <class Function>
Function cuda_function(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

void lock_pages(void* memory, size_t bytes) {
  const auto register_host = cuda_function<int (*)(void*, size_t, unsigned)>("cudaHostRegister");
  TESSERA_CHECK(register_host, ErrorKind::kConfig,
                "[state.create_cpu] shared memory cannot be page-locked with this libtorch. Leave one of share_memory "
                "and pin_memory off.");
  constexpr unsigned kPortable = 1;
  const int status = register_host(memory, bytes, kPortable);
  TESSERA_CHECK(status == 0, ErrorKind::kMemory,
                "[state.create_cpu] cudaHostRegister of {} bytes failed with CUDA error {}", bytes, status);
}

}  // namespace

bool can_pin_memory() {
  if (at::globalContext().hasCUDA()) return true;
  static std::atomic_flag warned;
  if (!warned.test_and_set()) log_warning("[state] pin_memory: there is no accelerator, so memory is not page-locked");
  return false;
}

at::Tensor empty_on_cpu(const at::Tensor& like, bool pin) {
  const auto options = at::TensorOptions().dtype(like.scalar_type()).device(c10::kCPU);
  return at::empty(like.sizes(), options.pinned_memory(pin && can_pin_memory()));
}

at::Tensor empty_in_shared_memory(const at::Tensor& like, bool pin) {
  const auto options = at::TensorOptions().dtype(like.scalar_type()).device(c10::kCPU);
  const size_t bytes = static_cast<size_t>(like.numel()) * like.dtype().itemsize();
  if (bytes == 0) return at::empty(like.sizes(), options);
  // An anonymous shared mapping is inherited by forked processes at the same address. The deleter of the tensor undoes
  // the two steps in reverse order: first the page-lock, then the mapping.
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  TESSERA_CHECK(memory != MAP_FAILED, ErrorKind::kMemory, "[state.create_cpu] no shared memory of {} bytes", bytes);
  const bool locked = pin && can_pin_memory();
  if (locked) {
    try {
      lock_pages(memory, bytes);
    } catch (...) {
      munmap(memory, bytes);
      throw;
    }
  }
  return at::from_blob(
      memory, like.sizes(),
      [bytes, locked](void* at) {
        if (locked) {
          const auto unregister = cuda_function<int (*)(void*)>("cudaHostUnregister");
          if (unregister) unregister(at);
        }
        munmap(at, bytes);
      },
      options);
}

}  // namespace tessera::detail
