// Runs one program on one rank and compares with the results of plain tensors.
#pragma once

#include "tests/conformance/meeting.h"
#include "tests/conformance/programs/ranks_session.h"

namespace tessera::testing {

// The message of a rank after a phase.
struct Word {
  std::string error;  // of libtorch or of this library
  bool peer_failed = false;
  int step = -1;          // step of the error
  std::string wrong;      // a value that differs from the plain one
  std::string signature;  // sizes, strides, types and placements of the rank's tensors
};

// COLLECTIVE over the mesh. Throws RanksParted if a rank did not come to the meeting.
Verdict run_on_rank(const Trial& trial, const MeshPtr& mesh, int rank, Meeting<Word>& meeting);

}  // namespace tessera::testing
