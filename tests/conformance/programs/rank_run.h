// One program on one rank against what plain tensors gave.
#pragma once

#include "tests/conformance/meeting.h"
#include "tests/conformance/programs/ranks_session.h"

namespace tessera::testing {

// What a rank has to say after a phase.
struct Word {
  std::string error;  // raised, by libtorch or by this library
  bool peer_failed = false;
  int step = -1;          // where
  std::string wrong;      // a value that differs from the plain one
  std::string signature;  // of what it holds
};

// COLLECTIVE over the mesh. Throws RanksParted where a rank did not come to the meeting.
Verdict run_on_rank(const Trial& trial, const MeshPtr& mesh, int rank, Meeting<Word>& meeting);

}  // namespace tessera::testing
