#include "tests/conformance/programs/refusal.h"

#include "tests/conformance/programs/evaluate.h"
#include "tests/conformance/refusal_text.h"

namespace tessera::testing {

const char* to_string(Refusal kind) {
  switch (kind) {
    case Refusal::kNone:
      return "none";
    case Refusal::kLostWrite:
      return "a write through a view of a gathered copy";
    case Refusal::kInPlace:
      return "in place, to another placement";
    case Refusal::kView:
      return "a view that cannot alias";
  }
  return "?";
}

bool matches(const std::string& text, const std::string& pattern) { return matches_text(text, pattern); }

Refusal refusal_of(const Step& step, const std::string& error) {
  if (writes(step)) {
    if (is_refusal(error, kLostWriteTexts)) return Refusal::kLostWrite;
    return is_refusal(error, kInPlaceTexts) ? Refusal::kInPlace : Refusal::kNone;
  }
  const bool aliases = step.op == "view" || step.op == "unflatten.int";
  const bool by_view = error.find("[dtensor.dispatch] aten::view(") != std::string::npos;
  return aliases && by_view && is_refusal(error, kViewTexts) ? Refusal::kView : Refusal::kNone;
}

}  // namespace tessera::testing
