// Runs a syntax tree: a tree walker over scopes, with Jinja2's scoping (loops, macros, calls and block-sets have scopes
// of their own, `if` has none) and its sandbox (no private attributes, nothing that changes a list or a dict).
//
// One Evaluator serves one render on one thread. Statements are in evaluator_statements.cc, calls in
// evaluator_calls.cc.
#pragma once

#include <ctime>
#include <deque>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/text/jinja/ast.h"
#include "tessera/text/jinja/value.h"

namespace tessera::text::jinja {

class Evaluator;

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

// Arguments by parameter, null where none is given.
using Bound = std::vector<const Value*>;

// The arguments of `function`, of whose parameters the first ones are required. Failure for too many, unknown or
// missing ones.
Bound bind(std::string_view function, const Arguments& arguments, std::span<const std::string_view> parameters,
           size_t required);
inline Bound bind(std::string_view function, const Arguments& arguments,
                  std::initializer_list<std::string_view> parameters, size_t required) {
  return bind(function, arguments, std::span(parameters.begin(), parameters.size()), required);
}

bool has_filter(std::string_view name);
bool has_test(std::string_view name);
std::string missing_filter(std::string_view name);  // what to say
std::string missing_test(std::string_view name);
Value apply_filter(Evaluator& evaluator, const std::string& name, const Value& input, const Arguments& arguments);
bool apply_test(Evaluator& evaluator, const std::string& name, const Value& input, const Arguments& arguments);

// Methods of str, dict, list and tuple that the sandbox allows.
bool has_method(const Value& self, std::string_view name);
bool is_forbidden_method(const Value& self, std::string_view name);
Value call_method(Evaluator& evaluator, const Value& self, const std::string& name, const Arguments& arguments);
Value call_global(Evaluator& evaluator, const std::string& name, const Arguments& arguments);
bool is_global(std::string_view name);

Value binary(Evaluator& evaluator, Operator op, const Value& left, const Value& right);
bool compare(Operator op, const Value& left, const Value& right, Budget& budget);
Value slice(Evaluator& evaluator, const Value& of, const Value& start, const Value& stop, const Value& step);
std::string format_new_style(Evaluator& evaluator, const std::string& format,
                             const Arguments& arguments);                                    // str.format
std::string format_percent(const std::string& format, const Value& values, Budget& budget);  // str % x
std::string html_escaped(std::string_view text);

struct Scope {
  std::shared_ptr<Scope> parent;
  std::vector<std::pair<std::string_view, Value>> variables;  // names live in the syntax tree or in the evaluator

  Value* find(std::string_view name, Budget& budget);
};

// The state of a running {% for %}, which the template sees as `loop`.
struct Loop {
  const Statement* statement = nullptr;
  std::shared_ptr<Scope> scope;  // outside of the loop; null when the loop has ended
  std::vector<Value> source;
  size_t next_source = 0;
  std::deque<Value> pending;  // taken from the source to look ahead
  int64_t index0 = -1;
  int64_t depth0 = 0;
  Value current, previous, changed;
  int depth_of_items = 1;
};

struct Macro {
  const MacroDefinition* tree = nullptr;
  std::shared_ptr<Scope> scope;
};

class Evaluator {
 public:
  // `time` is what strftime_now prints, in UTC; without it the machine's, in its own zone.
  explicit Evaluator(Budget budget, std::optional<std::time_t> time = {}) : budget_(budget), time_(time) {}
  ~Evaluator();
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  void define(std::string name, Value value);  // a variable of the whole template
  std::optional<std::time_t> time() const { return time_; }
  std::string run(const Body& body);  // once
  const std::vector<std::pair<size_t, size_t>>& generation_spans() const { return generation_spans_; }
  int line() const { return line_; }

  Budget& budget() { return budget_; }
  Value make_text(std::string text, bool markup = false);
  Value make_list(std::vector<Value> items, Kind kind = Kind::kList);
  Value make_dict(std::shared_ptr<const Dict> dict);
  Value make_namespace(std::shared_ptr<Dict> attributes);
  Value attribute(const Value& of, const std::string& name);
  Value item(const Value& of, const Value& key);
  Value call(const Value& callee, const Arguments& arguments);
  std::string text_of(const Value& value) { return to_text(value, budget_); }

 private:
  enum class Flow { kNormal, kBreak, kContinue };
  // running_depth_ with one level more. Failure where that is too deep.
  int next_depth() const;

  Value evaluate(const Expression& node);
  Value evaluate_name(const Expression& node);
  Value evaluate_collection(const Expression& node);
  Value evaluate_operator(const Expression& node);
  Value evaluate_comparison(const Expression& node);
  Value evaluate_concatenation(const Expression& node);
  Value evaluate_item(const Expression& node);
  Value evaluate_call(const Expression& node);
  Value evaluate_filter(const Expression& node, const Value* block_input);
  Value evaluate_test(const Expression& node);
  Arguments evaluate_arguments(const Expression& node);  // of a call, a filter or a test; then line_ is the node's
  Value loop_attribute(const Value& loop, const std::string& name);
  std::optional<Value> own_attribute(const Value& of, const std::string& name);

  Flow execute(const Body& body);
  Flow execute(const Statement& statement);
  Flow execute_if(const Statement& statement);
  Flow execute_for(const Statement& statement, std::vector<Value> items, int64_t depth0);
  void execute_call_block(const Statement& statement);
  Value filtered_block(const Statement& statement);  // what its body prints, behind its filters
  void execute_with(const Statement& statement);
  void execute_generation(const Statement& statement);
  void assign(const Target& target, Value value);
  bool pull(Loop& loop, Value& value);
  bool look_ahead(Loop& loop);
  Value call_macro(const Macro& macro, const Arguments& arguments);
  void bind_parameters(const MacroDefinition& tree, const Arguments& arguments);
  Value call_loop(const Value& loop, const Arguments& arguments);
  Value make_macro(const std::shared_ptr<const MacroDefinition>& definition);

  void emit(std::string_view text);
  std::string captured(const Body& body);  // runs the body, gives what it prints
  void set_variable(std::string_view name, Value value);
  std::shared_ptr<Scope> inner_scope(std::shared_ptr<Scope> parent);

  Budget budget_;
  std::optional<std::time_t> time_;
  int line_ = 0;
  int running_depth_ = 0;  // of recursion over the tree, expressions and statements, over all macros that are running
  int macro_depth_ = 0;
  std::shared_ptr<Scope> scope_ = std::make_shared<Scope>();
  std::string* out_ = nullptr;
  std::string root_out_;
  std::vector<std::pair<size_t, size_t>> generation_spans_;
  std::deque<std::string> names_;
  // Whatever can be part of a cycle of owners; emptied when the render ends.
  std::vector<std::shared_ptr<Namespace>> namespaces_;
  std::vector<std::shared_ptr<Scope>> captured_scopes_;
};

}  // namespace tessera::text::jinja
