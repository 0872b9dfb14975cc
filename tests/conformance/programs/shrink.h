// Shortens a program that shows a defect, as long as the shorter program shows the same defect.
#pragma once

#include <functional>
#include <optional>

#include "tests/conformance/programs/ranks_session.h"

namespace tessera::testing {

// Returns the program with its results on plain tensors; none if plain tensors raise or the results may not be
// compared.
std::shared_ptr<const Trial> make_trial(const Program& program);

// Returns the program without the step and without the steps that need it. With `bypass`, the step's target or operand
// takes the place of its result if it fits.
std::optional<Program> without(const Program& program, size_t step, bool bypass);

// `shows` runs a candidate and returns whether it still shows the defect.
Program shrink(Program program, const std::function<bool(const Program&)>& shows);

}  // namespace tessera::testing
