// One action of a pipeline rank, and its text form as in torch.distributed.pipelining.
//
//   const auto action = Action::parse("2F0");            // stage 2 runs the forward of micro-batch 0
//   action->text();                                      // "2F0"
//   Action::parse("(0F3;3B1)OVERLAP_F_B")->parts;        // two actions that may run concurrently
//
// A value type. No communication.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace tessera::pipeline {

enum class ActionKind : uint8_t {
  kForward,          // F: a stage's forward
  kBackward,         // B: gradients of the inputs and the parameters
  kInputBackward,    // I: gradients of the inputs, and of the parameters that are not deferred
  kWeightBackward,   // W: gradients of the weights, which action I deferred
  kUnshard,          // UNSHARD: the stage's parameters are all-gathered
  kReshard,          // RESHARD: the stage's parameters are freed
  kSendForward,      // SEND_F: the stage's output is sent to the next stage
  kReceiveForward,   // RECV_F: the stage's input is received
  kSendBackward,     // SEND_B: the gradient of the stage's input is sent to the stage before
  kReceiveBackward,  // RECV_B: the gradient of the stage's output is received
  kReduceGrad,       // REDUCE_GRAD: the stage's gradients are complete on this rank
  kOverlap,          // OVERLAP_F_B: two actions that may run concurrently
};
const char* to_string(ActionKind kind);  // the name in an action's text: "F", "SEND_F"

struct Action {
  int stage = -1;  // -1 for an overlap
  ActionKind kind = ActionKind::kForward;
  int micro_batch = -1;         // -1 for kUnshard, kReshard, kReduceGrad and kOverlap
  std::vector<Action> parts{};  // the actions of an overlap

  // Parses an action. nullopt for blank text (a bubble). Error kFormat, with torch's message, for invalid text.
  static std::optional<Action> parse(std::string_view text);
  std::string text() const;
  bool computes() const;  // F, B, I, W or an overlap
  using Key = std::tuple<int, ActionKind, int>;
  Key key() const { return {stage, kind, micro_batch}; }
  // Returns the parts of an overlap; for any other kind, this action alone.
  std::vector<Action> steps() const { return kind == ActionKind::kOverlap ? parts : std::vector<Action>{*this}; }
  bool operator==(const Action&) const = default;
};

}  // namespace tessera::pipeline
