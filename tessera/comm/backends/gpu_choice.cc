#include "tessera/comm/backends/gpu_choice.h"

#include <fmt/format.h>

namespace tessera::comm {

int gpu_of(int local_rank, int visible) { return visible == 1 ? 0 : local_rank; }

std::string why_too_few_gpus(int visible, int ranks_on_host, bool own_list) {
  if (visible == 0) return "no GPU is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES)";
  if (visible >= ranks_on_host || (visible == 1 && own_list)) return "";
  return fmt::format("{} ranks on this host, but {} GPU{}", ranks_on_host, visible, visible == 1 ? "" : "s");
}

}  // namespace tessera::comm
