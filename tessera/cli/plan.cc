#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"

namespace tessera::cli {

int run_plan(VerbArguments args) { return not_available("plan", args); }

}  // namespace tessera::cli
