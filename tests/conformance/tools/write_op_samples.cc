// Writes the samples as JSON for the scripts of tests/conformance/oracle, or writes op_ours.txt.
//
//   write_op_samples golden|values|ours FILE
#include <fstream>
#include <iostream>
#include <string>

#include "tests/conformance/behaviour.h"
#include "tests/conformance/op_table.h"
#include "tests/conformance/samples_json.h"

namespace {

void write_ours(const std::string& path) {
  using namespace tessera::testing;
  const OpTable theirs = read_op_table("op_table.txt");
  OpTable ours;
  for (const auto& one : behaviours_of(golden_samples())) {
    if (is_ours(theirs.at(one.op).at(one.inputs), one.behaviour)) ours[one.op][one.inputs] = one.behaviour;
  }
  std::ofstream(path)
      << R"(# Tessera's behaviour on a mesh of 4 for the lines of op_table.txt in which PyTorch is no reference:
# PyTorch raises an error, gives wrong values, or sends more bytes and has other placements.
# conformance_dist_test.cc compares Tessera's values with those of plain tensors.
# 'TESSERA_SOURCE=. build/write_op_samples ours FILE' writes this file.
)" << to_text(ours);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc == 3 ? argv[1] : "";
  if (which == "ours") {
    write_ours(argv[2]);
    return 0;
  }
  if (which != "golden" && which != "values") {
    std::cerr << "usage: write_op_samples golden|values|ours FILE\n";
    return 2;
  }
  tessera::testing::write_samples(
      which == "golden" ? tessera::testing::golden_samples() : tessera::testing::value_samples(), argv[2]);
  return 0;
}
