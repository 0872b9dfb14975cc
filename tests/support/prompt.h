// How long ranks may take to end, or to say what happened, after a peer died: less than what ends by itself (a
// collective after 60 s, a sleep after 50 s or more), and more than what two busy cores make of a second.
#pragma once

namespace tessera::testing {

inline constexpr double kPromptSeconds = 40;

}  // namespace tessera::testing
