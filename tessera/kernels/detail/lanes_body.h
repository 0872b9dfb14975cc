// What both halves of lanes.h have in terms of their own operations. Included within each of them.

// Through memory: GCC 12 warns of its own reductions.
inline float sum_of(Lanes values) {
  float each[kLanes];
  store_lanes(each, values);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) each[i] += each[i + half];
  }
  return each[0];
}
inline float largest_of(Lanes values) {
  float each[kLanes];
  store_lanes(each, values);
  float most = each[0];
  for (const float value : each) most = value > most ? value : most;
  return most;
}

// e^x to about one unit in the last place; 0 of -inf, NaN of NaN.
inline Lanes exp_lanes(Lanes x) {
  const Lanes high = fill(1.44269502F), low = fill(1.92596300e-8F);  // log2(e)
  const Lanes bounded = between(x, -104.0F, 89.0F);
  const Lanes power = rounded(mul(bounded, high));
  const Lanes rest = fma(bounded, low, fms(bounded, high, power));
  Lanes sum = fill(1.52527338e-5F);  // ln(2)^k / k!
  sum = fma(sum, rest, fill(1.54035304e-4F));
  sum = fma(sum, rest, fill(1.33335581e-3F));
  sum = fma(sum, rest, fill(9.61812911e-3F));
  sum = fma(sum, rest, fill(5.55041087e-2F));
  sum = fma(sum, rest, fill(2.40226507e-1F));
  sum = fma(sum, rest, fill(6.93147181e-1F));
  sum = fma(sum, rest, fill(1.0F));
  return select(not_numbers(x), x, times_power_of_two(sum, power));
}
