#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"

namespace tessera::cli {

int run_score(VerbArguments args) { return not_available("score", args); }

}  // namespace tessera::cli
