#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"

namespace tessera::cli {

int run_generate(VerbArguments args) { return not_available("generate", args); }

}  // namespace tessera::cli
