#include <string>
#include <vector>

#include "tessera/cli/verbs.h"

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + (argc > 0), argv + argc);
  return tessera::cli::run_program(args);
}
