// Makes a program that shows a defect shorter as long as it shows the same one.
#pragma once

#include <functional>
#include <optional>

#include "tests/conformance/programs/ranks_session.h"

namespace tessera::testing {

// What plain tensors give; none when they raise or nothing of it may be compared.
std::shared_ptr<const Trial> make_trial(const Program& program);

// Without that step and what needs it; what it wrote to or passed on takes its place where `bypass` is set and fits.
std::optional<Program> without(const Program& program, size_t step, bool bypass);

// `shows` runs a candidate and says whether it still shows the defect.
Program shrink(Program program, const std::function<bool(const Program&)>& shows);

}  // namespace tessera::testing
