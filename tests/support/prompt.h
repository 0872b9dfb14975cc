// The time in which ranks must end, or report an error, after a peer has died. The time is shorter than the time after
// which a rank ends by itself (a collective after 60 s, a sleep after 50 s or more), and long enough for two busy
// cores.
#pragma once

namespace tessera::testing {

inline constexpr double kPromptSeconds = 40;

}  // namespace tessera::testing
