// One program on one rank against what plain tensors gave.
#pragma once

#include "tests/conformance/programs/meeting.h"
#include "tests/conformance/programs/ranks_session.h"

namespace tessera::testing {

// COLLECTIVE over the mesh. Throws RanksParted where a rank did not come to the meeting.
Verdict run_on_rank(const Trial& trial, const MeshPtr& mesh, int rank, Meeting& meeting);

}  // namespace tessera::testing
