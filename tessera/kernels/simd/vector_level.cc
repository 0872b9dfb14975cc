#include "tessera/kernels/simd/vector_level.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::kernels {
namespace {

std::atomic<int> common_level{-1};                     // -1: ranks have not agreed
thread_local std::optional<VectorLevel> thread_level;  // by VectorLevelGuard

// Returns the level of this process before ranks agree on one: that of the environment variable TESSERA_ROW_KERNELS,
// else the highest level of the processor. It is computed once.
VectorLevel process_level() {
  static const VectorLevel level = [] {
    const char* variable = std::getenv("TESSERA_ROW_KERNELS");
    const std::string_view requested = variable != nullptr ? variable : "";
    const VectorLevel supported = max_vector_level();
    if (requested.empty()) return supported;
    if (requested == "plain") return VectorLevel::kPlain;
    if (requested == "avx2" && supported >= VectorLevel::kAvx2) return VectorLevel::kAvx2;
    if (requested == "avx512" && supported >= VectorLevel::kAvx512) return VectorLevel::kAvx512;
    raise(ErrorKind::kConfig,
          "[kernels.rows] TESSERA_ROW_KERNELS: found {}, wanted plain, avx2 or avx512, and a level that this processor "
          "supports. Correct it or unset it.",
          quote(requested));
  }();
  return level;
}

}  // namespace

VectorLevel max_vector_level() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // clang 14 does not know "f16c"
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return VectorLevel::kPlain;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return wide ? VectorLevel::kAvx512 : VectorLevel::kAvx2;
#else
  return VectorLevel::kPlain;
#endif
}

// The first of these decides: a VectorLevelGuard of this thread; the level that ranks agreed on; the level of this
// process.
VectorLevel vector_level() {
  if (thread_level) return *thread_level;
  const int common = common_level.load(std::memory_order_relaxed);
  return common < 0 ? process_level() : static_cast<VectorLevel>(common);
}

void set_vector_level(VectorLevel level) { common_level = static_cast<int>(level); }

VectorLevelGuard::VectorLevelGuard(VectorLevel level) : before_(thread_level) {
  TESSERA_CHECK(level <= max_vector_level(), ErrorKind::kConfig,
                "[kernels.rows] this processor does not support the vector instructions of the requested level");
  thread_level = level;
}

VectorLevelGuard::~VectorLevelGuard() { thread_level = before_; }

}  // namespace tessera::kernels
