// Writes the samples as JSON for the scripts of tests/conformance/oracle.
//   write_op_samples golden|values FILE
#include <iostream>
#include <string>

#include "tests/conformance/samples_json.h"

int main(int argc, char** argv) {
  const std::string which = argc == 3 ? argv[1] : "";
  if (which != "golden" && which != "values") {
    std::cerr << "usage: write_op_samples golden|values FILE\n";
    return 2;
  }
  tessera::testing::write_samples(
      which == "golden" ? tessera::testing::golden_samples() : tessera::testing::value_samples(), argv[2]);
  return 0;
}
