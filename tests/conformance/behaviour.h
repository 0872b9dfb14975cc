// The behaviour of this library for the samples of op_table.txt, on a mesh of 4: placements, bytes and errors.
#pragma once

#include <string>
#include <vector>

#include "tests/conformance/op_table.h"
#include "tests/conformance/samples_json.h"

namespace tessera::testing {

struct Observed {
  std::string op;      // "aten::mm#0"
  std::string inputs;  // "S(0) R"
  Behaviour behaviour;
  std::string error;        // text of the error
  bool may_refuse = false;  // whether `error` is a text with which an operation that writes, or a view, may refuse
};
// Returns the observations of rank 0, in the order of the samples.
std::vector<Observed> behaviours_of(const std::vector<SharedSample>& samples);

}  // namespace tessera::testing
