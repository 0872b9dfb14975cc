// Samples for PyTorch's DTensor: the same arguments and placements on both sides.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/conformance/reference.h"

namespace tessera::testing {

struct SharedSample {
  size_t index;  // among the samples of its operation
  std::shared_ptr<const Reference> reference;
  std::vector<Slot> slots;  // those that are placed: without out= arguments
  std::vector<Combination> placements;
  std::string name() const;  // "aten::mm#0"
};

// Of every operation, its first two samples with even sizes and all their combinations, for op_table.txt.
std::vector<SharedSample> golden_samples();
// A few hundred combinations of common operations, whose values are compared.
std::vector<SharedSample> value_samples();

void write_samples(const std::vector<SharedSample>& samples, const std::string& file);

}  // namespace tessera::testing
