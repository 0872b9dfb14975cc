#include "tessera/dtensor/comm_debug.h"

#include <numeric>

namespace tessera {

namespace {
thread_local CommDebugMode* innermost = nullptr;
}

CommDebugMode::CommDebugMode() : outer_(innermost) { innermost = this; }

CommDebugMode::~CommDebugMode() { innermost = outer_; }

int64_t CommDebugMode::total() const { return std::accumulate(std::begin(counts_), std::end(counts_), int64_t{0}); }

void CommDebugMode::record(CommKind kind, int64_t bytes) {
  for (CommDebugMode* mode = innermost; mode != nullptr; mode = mode->outer_) {
    ++mode->counts_[static_cast<int>(kind)];
    mode->bytes_ += bytes;
  }
}

}  // namespace tessera
