// The syntax tree of a template. A chain of operators of one precedence (a + b - c, a and b and c) is one node, so the
// depth of the tree grows only with nesting. The parser limits the depth.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/text/jinja/value.h"

namespace tessera::text::jinja {

struct Expression;
struct Statement;
using ExpressionPtr = std::unique_ptr<Expression>;
using Body = std::vector<Statement>;

// The comment of each kind names the fields of Expression that it uses.
enum class ExpressionKind {
  kLiteral,      // literal
  kName,         // text
  kList,         // operands
  kTuple,        // operands
  kDict,         // operands: key, value, key, value, ...
  kConditional,  // operands: condition, then, else (may be null)
  kOr,           // operands; operators has one entry between each two operands
  kAnd,          // as kOr
  kNot,          // operands[0]
  kCompare,      // as kOr
  kArithmetic,   // as kOr; left to right
  kConcat,       // as kOr; joined by ~
  kNegative,     // operands[0]
  kPositive,     // operands[0]
  kAttribute,    // operands[0], text
  kItem,         // operands[0], operands[1]
  kSlice,        // operands: start, stop, step, each may be null; only inside kItem
  kCall,         // operands[0], arguments
  kFilter,       // operands[0] (null in filter blocks), text, arguments
  kTest,         // operands[0], text, arguments
};

enum class Operator {
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kFloorDivide,
  kModulo,
  kPower,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kIn,
  kNotIn,
  kOr,
  kAnd,
  kConcat
};

struct CallArguments {
  std::vector<ExpressionPtr> positional;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
  ExpressionPtr unpacked_list;   // *args
  ExpressionPtr unpacked_named;  // **kwargs
};

struct Expression {
  ExpressionKind kind;
  int line = 0;
  int depth = 1;
  std::string text;
  Value literal;
  std::vector<ExpressionPtr> operands;
  std::vector<Operator> operators;
  std::unique_ptr<CallArguments> arguments;
};

// The comment of each kind names the fields of Statement that it uses.
enum class StatementKind {
  kText,         // text
  kPrint,        // value
  kIf,           // branches, otherwise
  kFor,          // target, value, condition (may be null), body, otherwise, recursive
  kSet,          // target, value
  kSetBlock,     // target, value (a filter chain, may be null), body
  kMacro,        // macro
  kCallBlock,    // value (a kCall), macro (the caller)
  kFilterBlock,  // value (a filter chain over the body), body
  kWith,         // assignments, body
  kGeneration,   // body
  kBreak,
  kContinue,
};

// The target of an assignment: a name, name.attribute of a namespace (attribute is not empty), or several targets in
// `parts`.
struct AssignmentTarget {
  std::string name;
  std::string attribute;
  std::vector<AssignmentTarget> parts;
};

struct MacroDefinition {
  std::string name;
  std::vector<std::string> parameters;
  std::vector<ExpressionPtr> defaults;  // for the last defaults.size() parameters
  Body body;
  bool uses_caller = false, uses_varargs = false, uses_kwargs = false;  // the body contains these names
};

struct IfBranch {
  ExpressionPtr condition;
  Body body;
};

struct Statement {
  StatementKind kind;
  int line = 0;
  std::string text{};
  ExpressionPtr value{};
  ExpressionPtr condition{};
  AssignmentTarget target{};
  Body body{};
  Body otherwise{};
  std::vector<IfBranch> branches{};
  std::vector<std::pair<AssignmentTarget, ExpressionPtr>> assignments{};
  std::shared_ptr<const MacroDefinition> macro{};
  bool recursive = false;
};

}  // namespace tessera::text::jinja
