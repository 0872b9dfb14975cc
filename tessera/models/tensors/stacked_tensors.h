// The tensors that a file may have in place of a stacked parameter. See WeightMap::ExpertStack.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/models/config/family.h"

namespace tessera {

// The rows first_row .. first_row + rows of one expert: [rows, columns].
struct StackedTensor {
  std::string name;
  int64_t expert, first_row, rows;
};

// Returns an empty list for a parameter that is not a stack.
std::vector<StackedTensor> stacked_tensors(const WeightMap& map, const std::string& parameter, c10::IntArrayRef sizes);

}  // namespace tessera
