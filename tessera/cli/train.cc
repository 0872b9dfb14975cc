#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"

namespace tessera::cli {

int run_train(VerbArguments args) { return not_available("train", args); }

}  // namespace tessera::cli
