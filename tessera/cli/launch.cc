#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"

namespace tessera::cli {

int run_launch(VerbArguments args) { return not_available("launch", args); }

}  // namespace tessera::cli
