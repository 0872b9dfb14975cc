#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"

namespace tessera::cli {

int run_doctor(VerbArguments args) { return not_available("doctor", args); }

}  // namespace tessera::cli
