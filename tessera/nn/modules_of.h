// Finds the modules of one type below a root.
//
//   for (const auto& [path, block] : nn::modules_of<nn::MoE>(*model)) ...
//
// The root keeps the modules. They belong to one rank.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::nn {

// The modules at and below `root` that are an M or derive from M, in the order and with the paths of named_modules().
template <class M>
std::vector<std::pair<std::string, M*>> modules_of(Module& root) {
  std::vector<std::pair<std::string, M*>> out;
  for (const auto& [path, module] : root.named_modules()) {
    if (auto* found = dynamic_cast<M*>(module)) out.emplace_back(path, found);
  }
  return out;
}

}  // namespace tessera::nn
