// The operations of the random programs, and the functions that draw their operands.
//
// A row is one operation of aten or of our kernels. A family is a set of rows that are drawn with one weight. To add an
// operation, add a row to its family's file.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/conformance/programs/draw.h"

namespace tessera::testing {

struct Row {
  std::string op;
  std::function<bool(Draw&)> draw;  // returns false if the call was not appended; may throw NothingFits
};
struct Family {
  std::string name;
  int weight;  // relative frequency
  std::vector<Row> rows;
};
const std::vector<Family>& catalog();
// Includes our own kernels and operations on class numbers. Every eighth seed draws from this catalog, so that the
// other seeds still draw the same programs as before.
const std::vector<Family>& catalog_with_kernels();

std::vector<Family> pointwise_families();
std::vector<Family> view_families();
std::vector<Family> reduction_families();
std::vector<Family> product_families();
std::vector<Family> index_families();
std::vector<Family> class_families();
std::vector<Family> write_families();
std::vector<Family> kernel_families();

// A program of 4 to 20 operations.
struct Drawn {
  Program program;
  Plain plain;
  std::string backward_note;  // why the program has no backward; else empty
};
Drawn draw_program(uint64_t seed, const std::vector<int64_t>& mesh);

}  // namespace tessera::testing
