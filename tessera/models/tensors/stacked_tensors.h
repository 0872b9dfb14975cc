// The per-expert tensors that a file may have in place of one parameter with stacked experts. See
// WeightMap::ExpertStack.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/models/config/family.h"

namespace tessera {

// A tensor [rows, columns] with the rows [first_row, first_row + rows) of one expert of the stacked parameter.
struct StackedTensor {
  std::string name;
  int64_t expert, first_row, rows;
};

// Returns the per-expert tensors for the stacked parameter with this name and these sizes; an empty list for other
// parameters.
std::vector<StackedTensor> stacked_tensors(const WeightMap& map, const std::string& parameter, c10::IntArrayRef sizes);

}  // namespace tessera
