// Which errors of a program are no defects: refusals of what cannot be done without losing a write or a copy.
//
//   refusal_of(step, error.what())    // kNone: the error is a defect
#pragma once

#include <string>

#include "tests/conformance/programs/program.h"

namespace tessera::testing {

enum class Refusal {
  kNone,
  kLostWrite,  // in place, through a view that holds a gathered copy
  kInPlace,    // in place, the result needs another placement than what is written has
  kView,       // a view that must alias and cannot
};
const char* to_string(Refusal kind);

// By the whole text of the error, which must be one that the kind of operation may give.
Refusal refusal_of(const Step& step, const std::string& error);
// Whether text is the pattern with each "{}" standing for anything.
bool matches(const std::string& text, const std::string& pattern);

}  // namespace tessera::testing
