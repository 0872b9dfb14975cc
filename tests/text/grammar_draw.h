// Checks a text against a grammar, and draws random texts of a grammar.
#pragma once

#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/text/grammar/grammar_states.h"

namespace tessera::text {

inline bool takes(GrammarStates& states, std::string_view text) {
  int32_t state = states.start();
  for (const char each : text) state = states.next(state, static_cast<uint8_t>(each));
  return states.accepts(state);
}

// Draws a text byte by byte. Bytes that close something are drawn more often. Returns "" in two cases: the text has no
// end within 2000 bytes, or no byte may follow although the text is not complete. `stuck` is set in the second case.
inline std::string drawn_text(GrammarStates& states, std::mt19937_64& draw, bool* stuck = nullptr) {
  std::string text;
  for (int32_t state = states.start(); text.size() < 2000;) {
    if (states.accepts(state) && (states.ends(state) || draw() % 3 == 0)) return text;
    std::vector<uint8_t> closing, all;
    for (int byte = 0; byte < 256; ++byte) {
      const auto value = static_cast<uint8_t>(byte);
      if (states.next(state, value) == GrammarStates::kDead) continue;
      all.push_back(value);
      if (std::string_view("\"]},:").find(static_cast<char>(byte)) != std::string_view::npos) closing.push_back(value);
    }
    if (all.empty()) {
      if (stuck) *stuck = true;
      return "";
    }
    const auto& from = !closing.empty() && draw() % 3 != 0 ? closing : all;
    const uint8_t byte = from[draw() % from.size()];
    text += static_cast<char>(byte);
    state = states.next(state, byte);
  }
  return "";
}

}  // namespace tessera::text
