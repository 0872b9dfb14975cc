#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"

namespace tessera::cli {

int run_ckpt(VerbArguments args) { return not_available("ckpt", args); }

}  // namespace tessera::cli
