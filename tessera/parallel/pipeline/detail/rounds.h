// Runs a table that has one row of steps for each rank. A step may depend on steps of other rows. Ends when no row can
// continue.
#pragma once

#include <cstddef>
#include <vector>

namespace tessera::pipeline::detail {

// Calls run(rank, step) for the next step of each row in turn, until no row can continue. run() returns whether the
// step could run; a step that could not is tried again in the next round. Returns the number of steps that ran in each
// row.
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
