// Functions whose code is the same for AVX2 and AVX-512, because it uses only operations that lanes_avx2.h and
// lanes_avx512.h both define. Both headers include this file.

inline Lanes select(AllLanes, Lanes yes, Lanes) { return yes; }
inline Lanes load_lanes(AllLanes, const float* from, Lanes) { return load_lanes(from); }
inline void store_lanes(AllLanes, float* to, Lanes values) { store_lanes(to, values); }

template <class Each>
void for_each_lanes(int64_t count, const Each& each) {
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) each(at, AllLanes{});
  if (at < count) each(at, first_lanes(count - at));
}

// e^x within about one unit in the last place; 0 for -inf, NaN for NaN. e^x = 2^power * 2^rest, where power is the
// integer nearest to x log2(e); log2(e) is split into two floats to keep `rest` exact. 2^rest is a polynomial.
inline Lanes exp_lanes(Lanes x) {
  const Lanes high = fill(1.44269502F), low = fill(1.92596300e-8F);  // log2(e)
  const Lanes bounded = between(x, -104.0F, 89.0F);
  const Lanes power = rounded(mul(bounded, high));
  const Lanes rest = fma(bounded, low, fms(bounded, high, power));
  Lanes sum = fill(1.52527338e-5F);  // coefficients ln(2)^k / k!
  sum = fma(sum, rest, fill(1.54035304e-4F));
  sum = fma(sum, rest, fill(1.33335581e-3F));
  sum = fma(sum, rest, fill(9.61812911e-3F));
  sum = fma(sum, rest, fill(5.55041087e-2F));
  sum = fma(sum, rest, fill(2.40226507e-1F));
  sum = fma(sum, rest, fill(6.93147181e-1F));
  sum = fma(sum, rest, fill(1.0F));
  return select(not_numbers(x), x, times_power_of_two(sum, power));
}
