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

std::atomic<int> agreed{-1};                   // -1: ranks have not agreed
thread_local std::optional<VectorLevel> used;  // by UseVectorLevel

// The level of this process before ranks agree on one: TESSERA_ROW_KERNELS, else the processor's. Computed once.
VectorLevel chosen() {
  static const VectorLevel level = [] {
    const char* given = std::getenv("TESSERA_ROW_KERNELS");
    const std::string_view wanted = given != nullptr ? given : "";
    const VectorLevel most = most_of_processor();
    if (wanted.empty()) return most;
    if (wanted == "plain") return VectorLevel::kPlain;
    if (wanted == "avx2" && most >= VectorLevel::kAvx2) return VectorLevel::kAvx2;
    if (wanted == "avx512" && most >= VectorLevel::kAvx512) return VectorLevel::kAvx512;
    raise(ErrorKind::kConfig,
          "[kernels.rows] TESSERA_ROW_KERNELS: found {}, wanted plain, avx2 or avx512, and a level that this processor "
          "supports. Correct it or unset it.",
          quote(wanted));
  }();
  return level;
}

}  // namespace

VectorLevel most_of_processor() {
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

// Precedence: UseVectorLevel of this thread, then the ranks' agreement, then the level of this process.
VectorLevel vector_level() {
  if (used) return *used;
  const int together = agreed.load(std::memory_order_relaxed);
  return together < 0 ? chosen() : static_cast<VectorLevel>(together);
}

void set_vector_level(VectorLevel level) { agreed = static_cast<int>(level); }

UseVectorLevel::UseVectorLevel(VectorLevel level) : before_(used) {
  TESSERA_CHECK(level <= most_of_processor(), ErrorKind::kConfig,
                "[kernels.rows] this processor does not support the vector instructions of the requested level");
  used = level;
}

UseVectorLevel::~UseVectorLevel() { used = before_; }

}  // namespace tessera::kernels
