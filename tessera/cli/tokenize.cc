#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"

namespace tessera::cli {

int run_tokenize(VerbArguments args) { return not_available("tokenize", args); }

}  // namespace tessera::cli
