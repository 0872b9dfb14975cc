// The version of this build, e.g. "0.1.0". Thread-safe.
#pragma once

namespace tessera {

const char* version() noexcept;

}  // namespace tessera
