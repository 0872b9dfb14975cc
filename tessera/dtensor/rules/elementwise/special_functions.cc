// Rules of the pointwise functions of torch.special.
#include "tessera/dtensor/rules/elementwise/pointwise.h"

namespace tessera {

void add_special_function_rules(RuleTable& table) {
  table.add("aten::special_modified_bessel_i1", pointwise(PartialRule::kIncreasing));
  table.add("aten::special_erfcx", pointwise(PartialRule::kDecreasing));
  table.add({"aten::special_modified_bessel_k0", "aten::special_modified_bessel_k1",
             "aten::special_scaled_modified_bessel_k0", "aten::special_scaled_modified_bessel_k1"},
            pointwise(PartialRule::kDecreasingAbove));
  // special_xlog1py(x, y) = x log1p(y) is linear in x.
  table.add("aten::special_xlog1py", pointwise(PartialRule::kDivision));
  table.add({"aten::special_xlog1py.self_scalar", "aten::special_xlog1py.self_scalar_out"},
            pointwise(PartialRule::kNone));
  const Rule no_partials = pointwise(PartialRule::kNone);
  // Bessel functions and related functions.
  table.add({"aten::special_airy_ai", "aten::special_bessel_j0", "aten::special_bessel_j1", "aten::special_bessel_y0",
             "aten::special_bessel_y1", "aten::special_i0e", "aten::special_i1", "aten::special_i1e",
             "aten::special_modified_bessel_i0", "aten::special_spherical_bessel_j0"},
            no_partials);
  // Polynomials in x, with the degree as second operand.
  table.add({"aten::special_chebyshev_polynomial_t", "aten::special_chebyshev_polynomial_u",
             "aten::special_chebyshev_polynomial_v", "aten::special_chebyshev_polynomial_w",
             "aten::special_hermite_polynomial_h", "aten::special_hermite_polynomial_he",
             "aten::special_laguerre_polynomial_l", "aten::special_legendre_polynomial_p",
             "aten::special_shifted_chebyshev_polynomial_t", "aten::special_shifted_chebyshev_polynomial_u",
             "aten::special_shifted_chebyshev_polynomial_v", "aten::special_shifted_chebyshev_polynomial_w"},
            no_partials);
  // Other functions.
  table.add({"aten::special_entr", "aten::special_log_ndtr", "aten::special_ndtri", "aten::special_zeta"}, no_partials);
}

}  // namespace tessera
