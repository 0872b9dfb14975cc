// Rows of steps that wait for one another, run as far as they can be.
#pragma once

#include <cstddef>
#include <vector>

namespace tessera::pipeline::detail {

// Calls run(rank, step) for the next step of every row in turn, until no row can go on; run says whether it ran the
// step, and is asked again otherwise. Returns how many steps of each row ran.
template <class Step, class Run>
std::vector<size_t> run_in_rounds(const std::vector<std::vector<Step>>& rows, const Run& run) {
  std::vector<size_t> ran(rows.size(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      if (ran[rank] == rows[rank].size() || !run(rank, rows[rank][ran[rank]])) continue;
      ++ran[rank];
      moved = true;
    }
  }
  return ran;
}

}  // namespace tessera::pipeline::detail
