// Samples as JSON for PyTorch's DTensor, so that both libraries run the same arguments and placements.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/conformance/reference.h"

namespace tessera::testing {

struct SharedSample {
  size_t index;  // among the samples of its operation
  std::shared_ptr<const Reference> reference;
  std::vector<Slot> slots;  // the slots that are placed: no out= arguments
  std::vector<Combination> placements;
  std::string name() const;  // "aten::mm#0"
};

// Returns the first two samples of every operation, with even sizes and all their combinations, for op_table.txt.
std::vector<SharedSample> golden_samples();
// Returns a few hundred combinations of common operations, whose values are compared.
std::vector<SharedSample> value_samples();

void write_samples(const std::vector<SharedSample>& samples, const std::string& file);

}  // namespace tessera::testing
