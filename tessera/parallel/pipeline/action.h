// What a rank of a pipeline does next, and its text as torch.distributed.pipelining writes it.
//
//   const auto action = Action::parse("2F0");            // stage 2 runs micro-batch 0 forward
//   action->text();                                      // "2F0"
//   Action::parse("(0F3;3B1)OVERLAP_F_B")->parts;        // two actions that may run beside one another
//
// A value. No communication.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace tessera::pipeline {

enum class ActionKind : uint8_t {
  kForward,          // F
  kBackward,         // B: gradients of inputs and parameters
  kInputBackward,    // I: of inputs, and of parameters what does not wait
  kWeightBackward,   // W: of parameters, what I has left
  kUnshard,          // the stage's parameters are gathered
  kReshard,          // and freed
  kSendForward,      // SEND_F: what the stage gave goes to the next one
  kReceiveForward,   // RECV_F: what it needs comes
  kSendBackward,     // SEND_B: the gradient of what it got goes back
  kReceiveBackward,  // RECV_B
  kReduceGrad,       // the stage's gradients are complete on this rank
  kOverlap,          // OVERLAP_F_B: its parts may run beside one another
};
const char* to_string(ActionKind kind);  // as the text of an action has it: "F", "SEND_F"

struct Action {
  int stage = -1;  // of an overlap: -1
  ActionKind kind = ActionKind::kForward;
  int micro_batch = -1;         // -1: of none (gathering, freeing, reducing, an overlap)
  std::vector<Action> parts{};  // of an overlap

  // Nothing for blank text, a bubble. Error kFormat with torch's words for what is no action.
  static std::optional<Action> parse(std::string_view text);
  std::string text() const;
  bool computes() const;  // F, B, I, W or an overlap
  using Key = std::tuple<int, ActionKind, int>;
  Key key() const { return {stage, kind, micro_batch}; }
  // The action itself, or the parts of an overlap.
  std::vector<Action> steps() const { return kind == ActionKind::kOverlap ? parts : std::vector<Action>{*this}; }
  bool operator==(const Action&) const = default;
};

}  // namespace tessera::pipeline
