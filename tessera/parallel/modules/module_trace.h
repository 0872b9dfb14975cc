// Tells CommDebugMode which module each collective belongs to.
//
//   CommDebugMode comm;
//   ModuleTrace trace(*model, "model");
//   (*model)(batch).sum().backward();
//   comm.by_module().at("model.layers.0").total_bytes();            // forward
//   comm.by_module().at("model.layers.0 (backward)").total();       // from the gradient of its output to that of its
//   input
//
// Hooks on every module below the root while it lives. One thread, that of the calls. No communication.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

class ModuleTrace {
 public:
  explicit ModuleTrace(nn::Module& root, const std::string& name = "model");
  ~ModuleTrace();
  ModuleTrace(const ModuleTrace&) = delete;
  ModuleTrace& operator=(const ModuleTrace&) = delete;

 private:
  std::vector<std::pair<nn::Module*, int>> hooks_;
  std::vector<std::string> names_;
};

}  // namespace tessera
