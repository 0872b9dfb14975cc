#include "tessera/models/tensors/stacked_tensors.h"

#include <fmt/format.h>

namespace tessera {

std::vector<StackedTensor> stacked_tensors(const WeightMap& map, const std::string& parameter, c10::IntArrayRef sizes) {
  std::vector<StackedTensor> out;
  for (const auto& stack : map.stacks) {
    if (!parameter.ends_with(stack.parameter)) continue;
    // "x.experts.gate_up_proj" gives "x.experts.M.gate_proj.weight" and "x.experts.M.up_proj.weight" for each expert M,
    // which divide the rows equally.
    const auto prefix = parameter.substr(0, parameter.rfind('.'));
    const int64_t rows = sizes[1] / static_cast<int64_t>(stack.tensors.size());
    for (int64_t expert = 0; expert < sizes[0]; ++expert) {
      int64_t first_row = 0;
      for (const auto& tensor : stack.tensors) {
        out.push_back({fmt::format("{}.{}.{}", prefix, expert, tensor), expert, first_row, rows});
        first_row += rows;
      }
    }
  }
  return out;
}

}  // namespace tessera
