// A stacked parameter as the tensors that a file may hold in its place. See WeightMap::Stack.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/models/config/family.h"

namespace tessera {

// Rows first_row .. first_row + rows of one expert: [rows, columns].
struct StackedTensor {
  std::string name;
  int64_t expert, first_row, rows;
};

// None for a parameter that is no stack.
std::vector<StackedTensor> stacked_tensors(const WeightMap& map, const std::string& parameter, c10::IntArrayRef sizes);

}  // namespace tessera
