// Reports to CommDebugMode which module is running, so that each collective is counted for its module.
//
//   CommDebugMode comm;
//   ModuleTrace trace(*model, "model");
//   (*model)(batch).sum().backward();
//   comm.by_module().at("model.layers.0").total_bytes();       // forward
//   comm.by_module().at("model.layers.0 (backward)").total();  // from the gradient of its output to that of its input
//
// While this object lives, every module at and below the root has hooks. Use it on the thread that calls the model. No
// communication.
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
