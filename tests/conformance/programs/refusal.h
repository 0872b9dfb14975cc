// The errors of a program that are no defects: the operation refuses because it would lose a write or would have to
// copy.
//
//   refusal_of(step, error.what())    // kNone: the error is a defect
#pragma once

#include <string>

#include "tests/conformance/programs/program.h"

namespace tessera::testing {

enum class Refusal {
  kNone,
  kLostWrite,  // a write in place through a view that is a gathered copy
  kInPlace,    // a write in place whose result needs other placements than its target
  kView,       // a view that must alias and cannot
};
const char* to_string(Refusal kind);

// Decides by the whole text of the error. The text must be one that this kind of operation may give.
Refusal refusal_of(const Step& step, const std::string& error);
// Whether `text` matches the pattern, in which each "{}" stands for any text.
bool matches(const std::string& text, const std::string& pattern);

}  // namespace tessera::testing
