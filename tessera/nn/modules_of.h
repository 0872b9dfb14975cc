// Finds the modules of one type below a root.
//
//   for (const auto& [path, block] : nn::modules_of<nn::MoE>(*model)) ...
//
// The returned pointers are valid while `root` exists and its modules are not replaced.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::nn {

// Returns the modules at and below `root` whose class is M or derives from M, in the order and with the paths of
// named_modules().
template <class M>
std::vector<std::pair<std::string, M*>> modules_of(Module& root) {
  std::vector<std::pair<std::string, M*>> out;
  for (const auto& [path, module] : root.named_modules()) {
    if (auto* found = dynamic_cast<M*>(module)) out.emplace_back(path, found);
  }
  return out;
}

}  // namespace tessera::nn
