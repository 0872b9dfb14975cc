#include "tessera/comm/shm/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <type_traits>

#include "tessera/base/enum_name.h"
#include "tessera/base/error.h"
#include "tessera/base/files/copy_bytes.h"

// The loops in this file must be vectorized. GCC does not vectorize loops of unknown length with -O2, and does not
// vectorize comparisons that could trap.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math")
#endif
#define TESSERA_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define TESSERA_INDEPENDENT_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define TESSERA_INDEPENDENT_LOOP _Pragma("GCC ivdep")
#endif

namespace tessera::comm::shm {
namespace {

constexpr size_t kBlock = 1024;  // elements; the accumulators of a block fit the L1 cache

// The accumulator type of an element type, and the conversions to and from it.
template <class T>
struct ElementTraits {
  using Accumulator = T;
  static TESSERA_INLINE T load(T value) { return value; }
  static TESSERA_INLINE T store(T value) { return value; }
};

struct BFloat16Bits {
  uint16_t bits;
};
template <>
struct ElementTraits<BFloat16Bits> {
  using Accumulator = float;
  static TESSERA_INLINE float load(BFloat16Bits value) {
    return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
  }
  // Rounds to nearest, ties to even. A NaN stays a NaN.
  static TESSERA_INLINE BFloat16Bits store(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return {static_cast<uint16_t>(is_nan ? 0x7FC0 : rounded)};
  }
};

template <>
struct ElementTraits<c10::Half> {
  using Accumulator = float;
  static TESSERA_INLINE float load(c10::Half value) { return c10::detail::fp16_ieee_to_fp32_value(value.x); }
  static TESSERA_INLINE c10::Half store(float value) {
    return c10::Half(c10::detail::fp16_ieee_from_fp32_value(value), c10::Half::from_bits());
  }
};

// The unsigned type in which integers are added and multiplied, since signed overflow is undefined. Integers below 32
// bits use uint32_t: as uint16_t they would be promoted to int, whose multiplication can overflow.
template <class T>
struct WrappingType {
  using type = T;
};
template <class T>
requires(std::is_integral_v<T> && sizeof(T) < 4) struct WrappingType<T> {
  using type = uint32_t;
};
template <class T>
requires(std::is_integral_v<T> && sizeof(T) >= 4) struct WrappingType<T> {
  using type = std::make_unsigned_t<T>;
};

struct Sum {
  template <class T>
  static TESSERA_INLINE T apply(T a, T b) {
    using W = typename WrappingType<T>::type;
    return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
  }
};
struct Product {
  template <class T>
  static TESSERA_INLINE T apply(T a, T b) {
    using W = typename WrappingType<T>::type;
    return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
  }
};
struct Min {
  template <class T>
  static TESSERA_INLINE T apply(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;  // a NaN in b is returned, too: comparisons with a NaN are false
  }
};
struct Max {
  template <class T>
  static TESSERA_INLINE T apply(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};
struct And {
  template <class T>
  static TESSERA_INLINE T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <class T>
  static TESSERA_INLINE T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <class T>
  static TESSERA_INLINE T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

struct ReduceArguments {
  void* out;
  const void* const* sources;
  size_t sources_count;
  size_t count;
  bool average;
};

// The last step of a reduction: out[i] = a[i] op b[i], divided for averages, converted to T. `out` may be a source:
// element i is read before it is written, and no other element is used, so the loop may be vectorized.
template <class T, class Op, bool average, class First>
TESSERA_INLINE void combine(T* out, const First* a, const T* b, size_t count,
                            typename ElementTraits<T>::Accumulator divisor) {
  using E = ElementTraits<T>;
  using A = typename E::Accumulator;
  TESSERA_INDEPENDENT_LOOP
  for (size_t i = 0; i < count; ++i) {
    A value;
    if constexpr (std::is_same_v<First, T>) {
      value = Op::template apply<A>(E::load(a[i]), E::load(b[i]));
    } else {
      value = Op::template apply<A>(a[i], E::load(b[i]));
    }
    if constexpr (average) value = value / divisor;
    out[i] = E::store(value);
  }
}

// Two sources are combined in one pass. More sources are accumulated block by block in the accumulator type, and the
// last source is combined with the conversion to T.
template <class T, class Op, bool average>
TESSERA_INLINE void run(const ReduceArguments& arguments) {
  using E = ElementTraits<T>;
  using A = typename E::Accumulator;
  T* const out = static_cast<T*>(arguments.out);
  const auto source = [&](size_t index) { return static_cast<const T*>(arguments.sources[index]); };
  const size_t last = arguments.sources_count - 1;
  const A divisor = static_cast<A>(arguments.sources_count);
  if (last == 1) return combine<T, Op, average>(out, source(0), source(1), arguments.count, divisor);
  A sum[kBlock];
  for (size_t begin = 0; begin < arguments.count; begin += kBlock) {
    const size_t count = std::min(kBlock, arguments.count - begin);
    const T *first = source(0) + begin, *second = source(1) + begin;
    for (size_t i = 0; i < count; ++i) sum[i] = Op::template apply<A>(E::load(first[i]), E::load(second[i]));
    for (size_t index = 2; index < last; ++index) {
      const T* next = source(index) + begin;
      for (size_t i = 0; i < count; ++i) sum[i] = Op::template apply<A>(sum[i], E::load(next[i]));
    }
    combine<T, Op, average, A>(out + begin, sum, source(last) + begin, count, divisor);
  }
}

template <class T, class Op>
TESSERA_INLINE void run(const ReduceArguments& arguments) {
  arguments.average ? run<T, Op, true>(arguments) : run<T, Op, false>(arguments);
}

// run() compiled for AVX2. run_best() chooses between the two versions at run time.
#if defined(__x86_64__)
template <class T, class Op>
__attribute__((target("avx2"))) void run_avx2(const ReduceArguments& arguments) {
  run<T, Op>(arguments);
}
bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

// Calls run_avx2() if the processor has AVX2, else run(). Both compute the same values: the order of operations is the
// same, and no multiplication and addition are fused. has_avx2() queries the processor once.
template <class T, class Op>
void run_best(const ReduceArguments& arguments) {
#if defined(__x86_64__)
  if (has_avx2()) return run_avx2<T, Op>(arguments);
#endif
  run<T, Op>(arguments);
}

template <class T>
void run_arithmetic(const ReduceArguments& arguments, RedOp op) {
  if (op == RedOp::SUM || op == RedOp::AVG) return run_best<T, Sum>(arguments);
  if (op == RedOp::PRODUCT) return run_best<T, Product>(arguments);
  if (op == RedOp::MIN) return run_best<T, Min>(arguments);
  run_best<T, Max>(arguments);
}

template <class T>
void run_integer(const ReduceArguments& arguments, RedOp op) {
  if (op == RedOp::BAND) return run_best<T, And>(arguments);
  if (op == RedOp::BOR) return run_best<T, Or>(arguments);
  if (op == RedOp::BXOR) return run_best<T, Xor>(arguments);
  run_arithmetic<T>(arguments, op);
}

// A bool is a byte of 0 or 1.
void run_bool(const ReduceArguments& arguments, RedOp op) {
  if (op == RedOp::SUM || op == RedOp::MAX || op == RedOp::BOR) return run_best<uint8_t, Or>(arguments);
  if (op == RedOp::BXOR) return run_best<uint8_t, Xor>(arguments);
  run_best<uint8_t, And>(arguments);
}

}  // namespace

const char* name_of(RedOp op) noexcept {
  return enum_name(op, {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"}, "an unknown operation");
}

void check_reducible(c10::ScalarType type, RedOp op) {
  const bool floating = type == c10::kFloat || type == c10::kDouble || type == c10::kHalf || type == c10::kBFloat16;
  const bool integer =
      type == c10::kByte || type == c10::kChar || type == c10::kShort || type == c10::kInt || type == c10::kLong;
  const bool bitwise = op == RedOp::BAND || op == RedOp::BOR || op == RedOp::BXOR;
  const bool known =
      bitwise || op == RedOp::SUM || op == RedOp::AVG || op == RedOp::PRODUCT || op == RedOp::MIN || op == RedOp::MAX;
  const bool fits = floating ? !bitwise : (integer || type == c10::kBool) && op != RedOp::AVG;
  TESSERA_CHECK(known && fits, ErrorKind::kShape, "[comm.shm] cannot reduce {} by {}", c10::toString(type),
                name_of(op));
}

void reduce(void* out, const std::vector<const void*>& sources, size_t count, c10::ScalarType type, RedOp op) {
  if (count == 0) return;
  if (sources.size() == 1) {
    if (out != sources[0]) copy_bytes(out, sources[0], count * c10::elementSize(type));
    return;
  }
  const ReduceArguments arguments{out, sources.data(), sources.size(), count, op == RedOp::AVG};
  switch (type) {
    case c10::kFloat:
      return run_arithmetic<float>(arguments, op);
    case c10::kDouble:
      return run_arithmetic<double>(arguments, op);
    case c10::kHalf:
      return run_arithmetic<c10::Half>(arguments, op);
    case c10::kBFloat16:
      return run_arithmetic<BFloat16Bits>(arguments, op);
    case c10::kByte:
      return run_integer<uint8_t>(arguments, op);
    case c10::kChar:
      return run_integer<int8_t>(arguments, op);
    case c10::kShort:
      return run_integer<int16_t>(arguments, op);
    case c10::kInt:
      return run_integer<int32_t>(arguments, op);
    case c10::kLong:
      return run_integer<int64_t>(arguments, op);
    case c10::kBool:
      return run_bool(arguments, op);
    default:
      raise(ErrorKind::kInternal, "[comm.shm] reduction of {}", c10::toString(type));
  }
}

}  // namespace tessera::comm::shm
