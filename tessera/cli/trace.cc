#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"

namespace tessera::cli {

int run_trace(VerbArguments args) { return not_available("trace", args); }

}  // namespace tessera::cli
