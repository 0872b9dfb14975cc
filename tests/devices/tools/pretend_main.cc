// The program `tessera` with the pretend device registered: `tessera_pretend train RECIPE train.device=pretend`.
#include <string>
#include <vector>

#include "tessera/cli/verbs.h"
#include "tests/support/pretend_device/pretend_device.h"

int main(int argc, char** argv) {
  tessera::pretend::install();
  const std::vector<std::string> args(argv + (argc > 0), argv + argc);
  return tessera::cli::run_program(args);
}
