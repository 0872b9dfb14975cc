// Whether what plain tensors give may be compared with what ranks give: no value depends visibly on rounding.
//
//   const Plain plain = run_plain(program, Twin::kClean);
//   if (is_sound(program, plain)) { ... }
#pragma once

#include <utility>

#include "tests/conformance/programs/evaluate.h"

namespace tessera::testing {

// Noise in the last bits has not grown to what can be seen.
bool is_stable(const at::Tensor& clean, const at::Tensor& noisy);
bool are_stable(const std::vector<c10::IValue>& clean, const std::vector<c10::IValue>& noisy);
// A narrow value is that of the wide twin to the bit.
bool is_exact(const at::Tensor& clean, const at::Tensor& wide);
// Least and largest value; infinite when some are not finite.
std::pair<double, double> bounds(const at::Tensor& tensor);
// Of all values and gradients. Runs the program's twins.
bool is_sound(const Program& program, const Plain& plain);

}  // namespace tessera::testing
