#include "tessera/parallel/pipeline/action.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::pipeline {
namespace {

constexpr std::array<const char*, 12> kKindNames = {
    "F", "B", "I", "W", "UNSHARD", "RESHARD", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "OVERLAP_F_B"};
constexpr int kMaxNumber = 1'000'000;

[[noreturn]] void invalid_action(std::string_view text) {
  raise(ErrorKind::kFormat,
        "[pipeline.action] Invalid action string: {}, should be formatted as [stage][action type][(microbatch)] e.g. "
        "2F0",
        quote(text));
}

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

std::optional<ActionKind> kind_of(std::string_view name) {
  const auto found = std::ranges::find(kKindNames, name);
  if (found == kKindNames.end()) return std::nullopt;
  return static_cast<ActionKind>(found - kKindNames.begin());
}

bool has_micro_batch(ActionKind kind) {
  return kind != ActionKind::kUnshard && kind != ActionKind::kReshard && kind != ActionKind::kReduceGrad &&
         kind != ActionKind::kOverlap;
}

// Takes a number without a sign from the start of `text` and removes it. nullopt for no number, or one above
// kMaxNumber.
std::optional<int> consume_number(std::string_view& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || text.front() == '-' || value > kMaxNumber) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

Action parse_overlap(std::string_view text) {
  const auto close = text.find(')');
  const auto name = text.substr(close + 1);
  TESSERA_CHECK(kind_of(name) == ActionKind::kOverlap, ErrorKind::kFormat,
                "[pipeline.action] Invalid computation type {}: found {}, wanted (action;action)OVERLAP_F_B",
                quote(name), quote(text));
  Action overlap{.kind = ActionKind::kOverlap};
  for (auto remaining = text.substr(1, close - 1); !remaining.empty();) {
    const auto end = std::min(remaining.find(';'), remaining.size());
    const auto part = Action::parse(remaining.substr(0, end));
    if (part && part->kind == ActionKind::kOverlap) invalid_action(text);
    if (part) overlap.parts.push_back(*part);
    remaining.remove_prefix(std::min(end + 1, remaining.size()));
  }
  if (overlap.parts.empty()) invalid_action(text);
  return overlap;
}

}  // namespace

const char* to_string(ActionKind kind) { return kKindNames.at(static_cast<size_t>(kind)); }

std::optional<Action> Action::parse(std::string_view raw_text) {
  const auto text = trimmed(raw_text);
  if (text.empty()) return std::nullopt;
  if (text.front() == '(' && text.find(')') != std::string_view::npos) return parse_overlap(text);
  auto remaining = text;
  const auto stage = consume_number(remaining);
  const auto name = remaining.substr(0, std::min(remaining.find_first_of("0123456789"), remaining.size()));
  const auto kind = kind_of(name);
  if (!stage || !kind || kind == ActionKind::kOverlap) invalid_action(text);
  Action action{.stage = *stage, .kind = *kind};
  remaining.remove_prefix(name.size());
  const auto micro_batch = remaining.empty() ? std::nullopt : consume_number(remaining);
  if (!remaining.empty() || micro_batch.has_value() != has_micro_batch(*kind)) invalid_action(text);
  action.micro_batch = micro_batch.value_or(-1);
  return action;
}

std::string Action::text() const {
  if (kind != ActionKind::kOverlap) {
    const auto number = micro_batch < 0 ? std::string() : std::to_string(micro_batch);
    return std::to_string(stage) + to_string(kind) + number;
  }
  std::string out = "(";
  for (const auto& part : parts) out += (out.size() == 1 ? "" : ";") + part.text();
  return out + ")" + to_string(kind);
}

bool Action::computes() const { return kind <= ActionKind::kWeightBackward || kind == ActionKind::kOverlap; }

}  // namespace tessera::pipeline
