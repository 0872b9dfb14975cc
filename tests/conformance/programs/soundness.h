// Whether the results of plain tensors may be compared with the results of ranks: no value may depend visibly on
// rounding.
//
//   const Plain plain = run_plain(program, Twin::kClean);
//   if (is_sound(program, plain)) { ... }
#pragma once

#include <utility>

#include "tests/conformance/programs/evaluate.h"

namespace tessera::testing {

// Whether the noise in the last bits has not grown to a visible difference.
bool is_stable(const at::Tensor& clean, const at::Tensor& noisy);
bool are_stable(const std::vector<c10::IValue>& clean, const std::vector<c10::IValue>& noisy);
// Whether a narrow value equals the wide twin's value to the bit.
bool is_exact(const at::Tensor& clean, const at::Tensor& wide);
// Returns the smallest and the largest value; infinite if some values are not finite.
std::pair<double, double> bounds(const at::Tensor& tensor);
// Checks all values and gradients. Runs the program's twins.
bool is_sound(const Program& program, const Plain& plain);

}  // namespace tessera::testing
