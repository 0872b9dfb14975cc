// The operations that programs are made of, and how each is given operands.
//
// A row is one operation of aten or of our kernels, a family those that are drawn alike. To add one: a row in its
// family's file.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/conformance/programs/draw.h"

namespace tessera::testing {

struct Row {
  std::string op;
  std::function<bool(Draw&)> draw;  // whether it was taken; may throw NothingFits
};
struct Family {
  std::string name;
  int weight;  // how often, beside the others
  std::vector<Row> rows;
};
const std::vector<Family>& catalog();
// With our own kernels and operations on class numbers: every eighth seed draws from these, so that the other seeds
// draw what they drew before.
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
  std::string backward_note;  // why nothing flows back; empty when something does
};
Drawn draw_program(uint64_t seed, const std::vector<int64_t>& mesh);

}  // namespace tessera::testing
