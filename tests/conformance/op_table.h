// op_table.txt, what PyTorch's DTensor does; op_differences.txt, where this library does something else on purpose; and
// op_ours.txt, what it does where PyTorch's is no example: it raises, gives a wrong value, or moves more bytes to end
// with other placements.
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
OpTable read_op_table(const std::string& name);  // of tests/conformance
// Operations alike share a block.
std::string to_text(const OpTable& table);

// How ours differs; a difference that is not listed fails.
enum class DifferenceKind {
  kFewer,      // fewer bytes and the same placements: no reason is needed
  kElsewhere,  // fewer bytes and other placements: op_ours.txt says which
  kPlacement,  // other placements, as many bytes
  kMore,       // more bytes
  kRefuses,    // an error where upstream has none
};
std::optional<DifferenceKind> difference(const Behaviour& theirs, const Behaviour& ours);
// Whether op_ours.txt is to say what happens.
bool is_ours(const Behaviour& theirs, const Behaviour& ours);

class ListedDifferences {
 public:
  ListedDifferences();  // reads op_differences.txt
  // Whether a line allows it; the lines that do count it.
  bool allows(DifferenceKind kind, const std::string& op, const std::string& inputs);
  // Lines that allowed more or less than they say, and how much.
  std::vector<std::string> miscounted() const;

 private:
  struct Line {
    std::string text, kind, op, inputs;
    int64_t allowed = 0, used = 0;  // combinations
  };
  std::vector<Line> lines_;
};

}  // namespace tessera::testing
