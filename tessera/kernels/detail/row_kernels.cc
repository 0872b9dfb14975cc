#include "tessera/kernels/detail/row_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/quote.h"

namespace tessera::detail {
namespace {

bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

bool has_avx2() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // clang 14 does not know "f16c"
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
#else
  return false;
#endif
}

const RowKernels& choose() {
  const char* given = std::getenv("TESSERA_ROW_KERNELS");
  const std::string_view wanted = given != nullptr ? given : "";
  if (has_avx512() && (wanted.empty() || wanted == "avx512")) return avx512_row_kernels();
  if (has_avx2() && (wanted.empty() || wanted == "avx2")) return avx2_row_kernels();
  TESSERA_CHECK(
      wanted.empty() || wanted == "plain", ErrorKind::kConfig,
      "[kernels.rows] TESSERA_ROW_KERNELS: found {}, wanted plain, or avx2 or avx512 where the processor has it. "
      "Correct it or unset it.",
      quote(wanted));
  return plain_row_kernels();
}

}  // namespace

const RowKernels& row_kernels() {
  static const RowKernels& chosen = choose();
  return chosen;
}

}  // namespace tessera::detail
