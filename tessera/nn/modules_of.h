// The modules of one kind below a root.
//
//   for (const auto& [path, block] : nn::modules_of<nn::MoE>(*model)) ...
//
// They stay the root's. Belongs to one rank.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::nn {

// At and below `root`, those that are an M or derive from it, in the order and with the paths of named_modules().
template <class M>
std::vector<std::pair<std::string, M*>> modules_of(Module& root) {
  std::vector<std::pair<std::string, M*>> out;
  for (const auto& [path, module] : root.named_modules()) {
    if (auto* found = dynamic_cast<M*>(module)) out.emplace_back(path, found);
  }
  return out;
}

}  // namespace tessera::nn
