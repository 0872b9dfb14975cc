// What this library does on a mesh of 4 with the samples of op_table.txt.
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
  std::string error;        // its text
  bool may_refuse = false;  // with that text: one of those of the operations that write, or of the views
};
// As rank 0 sees them, in the order of the samples.
std::vector<Observed> behaviours_of(const std::vector<SharedSample>& samples);

}  // namespace tessera::testing
