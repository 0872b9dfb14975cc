// The tables of operations. op_table.txt has the behaviour of PyTorch's DTensor. op_differences.txt lists intended
// differences of this library. op_ours.txt has this library's behaviour for cases in which PyTorch's is no reference:
// PyTorch raises, gives a wrong value, or moves more bytes and ends with other placements.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

// The behaviour of an operation for placements of its tensors.
struct Behaviour {
  bool error = false;
  bool wrong = false;                // whether PyTorch's value differs from the plain operation's
  std::vector<std::string> outputs;  // placements
  int64_t bytes = 0;                 // bytes that a rank receives
  std::string to_string() const;
};
Behaviour parse_behaviour(const std::string& text);

// Maps "aten::mm#0" -> "S(0) R" -> behaviour.
using OpTable = std::map<std::string, std::map<std::string, Behaviour>>;
OpTable read_op_table(const std::string& name);  // file in tests/conformance
// Writes one block for all operations with the same behaviour.
std::string to_text(const OpTable& table);

// The kind of a difference from PyTorch. A difference that is not listed fails.
enum class DifferenceKind {
  kFewer,      // fewer bytes and the same placements: no reason is needed
  kElsewhere,  // fewer bytes and other placements: op_ours.txt says which
  kPlacement,  // other placements, as many bytes
  kMore,       // more bytes
  kRefuses,    // an error where upstream has none
};
std::optional<DifferenceKind> difference(const Behaviour& theirs, const Behaviour& ours);
// Whether op_ours.txt must have the behaviour.
bool is_ours(const Behaviour& theirs, const Behaviour& ours);

class ListedDifferences {
 public:
  ListedDifferences();  // reads op_differences.txt
  // Whether a line of the file allows the difference. Each line counts the differences that it allows.
  bool allows(DifferenceKind kind, const std::string& op, const std::string& inputs);
  // Returns the lines whose count of allowed differences is not the stated count, with both numbers.
  std::vector<std::string> miscounted() const;

 private:
  struct Line {
    std::string text, kind, op, inputs;
    int64_t allowed = 0, used = 0;  // combinations
  };
  std::vector<Line> lines_;
};

}  // namespace tessera::testing
