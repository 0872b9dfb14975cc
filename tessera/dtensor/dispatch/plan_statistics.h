// How often calls on DTensors found a plan that was made before. A program whose shapes and placements repeat makes
// none after its first step:
//
//   const PlanStatistics before = plan_statistics();
//   step();
//   fmt::print("{} new plans", plan_statistics().misses - before.misses);
//
// Of the calling thread, as plans are: in a process that runs one rank that is the rank's, but for backwards on an
// accelerator, which libtorch runs on threads of its own. No communication.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

struct PlanStatistics {
  uint64_t hits = 0;
  uint64_t misses = 0;  // a plan was made; calls whose plan holds for them only are in neither
  size_t plans = 0;     // kept now
};

PlanStatistics plan_statistics();
// Forgets this thread's plans and counts: the next call of each kind makes its plan again.
void clear_plans();

}  // namespace tessera
