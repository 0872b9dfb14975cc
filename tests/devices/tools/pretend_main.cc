// The program `tessera` with the pretend device registered: `tessera_pretend train RECIPE train.device=pretend`. A rank
// exits with 70 if the device found a wrong use of memory.
#include <cstdio>
#include <string>
#include <vector>

#include "tessera/cli/verbs.h"
#include "tests/support/pretend_device/pretend_device.h"

int main(int argc, char** argv) {
  tessera::pretend::install();
  const std::vector<std::string> args(argv + (argc > 0), argv + argc);
  const int status = tessera::cli::run_program(args);
  const auto faults = tessera::pretend::take_faults();
  for (const auto& fault : faults) std::fprintf(stderr, "pretend device: %s\n", fault.c_str());
  return faults.empty() ? status : 70;
}
