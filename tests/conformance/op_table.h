// op_table.txt, what PyTorch's DTensor does, and op_differences.txt, where this library does something else on purpose.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

// What an operation gives for placements of its tensors.
struct Behaviour {
  bool error = false;
  bool wrong = false;                // PyTorch gives another value than the plain operation
  std::vector<std::string> outputs;  // placements
  int64_t bytes = 0;                 // that come to a rank
  std::string to_string() const;
};
Behaviour parse_behaviour(const std::string& text);

// "aten::mm#0" -> "S(0) R" -> what happens.
using OpTable = std::map<std::string, std::map<std::string, Behaviour>>;
OpTable read_op_table();

// How ours differs; a difference that is not listed fails.
enum class DifferenceKind {
  kFewer,      // fewer bytes: no reason is needed
  kPlacement,  // other placements, as many bytes
  kMore,       // more bytes
  kRefuses,    // an error where upstream has none
};
std::optional<DifferenceKind> difference(const Behaviour& theirs, const Behaviour& ours);

class ListedDifferences {
 public:
  ListedDifferences();  // reads op_differences.txt
  // Whether a line allows it; the line counts as used.
  bool allows(DifferenceKind kind, const std::string& op, const std::string& inputs);
  std::vector<std::string> unused() const;

 private:
  struct Line {
    std::string text, kind, op, inputs;
    bool used = false;
  };
  std::vector<Line> lines_;
};

}  // namespace tessera::testing
