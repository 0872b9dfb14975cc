// Renders a template by walking its syntax tree. Scopes are those of Jinja2: loops, macros, call blocks and set blocks
// have their own scope, `if` has none. The sandbox is also Jinja2's: no private attributes, and no method that changes
// a list or a dict.
//
// One Evaluator does one render on one thread. Statements are in evaluator_statements.cc, calls in evaluator_calls.cc.
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

// The argument of each parameter, in the order of the parameters; null where the call has none.
using BoundArguments = std::vector<const Value*>;

// Assigns the arguments of a call to the parameters of `function`. The first `required` parameters need an argument.
// RenderError when there are too many, unknown or missing arguments.
BoundArguments bind(std::string_view function, const Arguments& arguments, std::span<const std::string_view> parameters,
                    size_t required);
inline BoundArguments bind(std::string_view function, const Arguments& arguments,
                           std::initializer_list<std::string_view> parameters, size_t required) {
  return bind(function, arguments, std::span(parameters.begin(), parameters.size()), required);
}

bool has_filter(std::string_view name);
bool has_test(std::string_view name);
std::string unknown_filter_message(std::string_view name);  // the error message for an unknown filter
std::string unknown_test_message(std::string_view name);    // the error message for an unknown test
Value apply_filter(Evaluator& evaluator, const std::string& name, const Value& input, const Arguments& arguments);
bool apply_test(Evaluator& evaluator, const std::string& name, const Value& input, const Arguments& arguments);

// Methods of str, dict, list and tuple that the sandbox allows.
bool has_method(const Value& self, std::string_view name);
bool is_forbidden_method(const Value& self, std::string_view name);
Value call_method(Evaluator& evaluator, const Value& self, const std::string& name, const Arguments& arguments);
Value call_global(Evaluator& evaluator, const std::string& name, const Arguments& arguments);
bool is_global(std::string_view name);

// The operators of Python. RenderError where Python raises TypeError, and when an integer does not fit in 64 bits.
Value binary(Evaluator& evaluator, Operator op, const Value& left, const Value& right);
bool compare(Operator op, const Value& left, const Value& right, Budget& budget);
Value slice(Evaluator& evaluator, const Value& of, const Value& start, const Value& stop, const Value& step);
std::string format_new_style(Evaluator& evaluator, const std::string& format,
                             const Arguments& arguments);                                    // str.format
std::string format_percent(const std::string& format, const Value& values, Budget& budget);  // str % x
std::string html_escaped(std::string_view text);

struct Scope {
  std::shared_ptr<Scope> parent;
  std::vector<std::pair<std::string_view, Value>> variables;  // names are owned by the syntax tree or the evaluator

  // Searches this scope and then its parents. Null when no scope has the variable.
  Value* find(std::string_view name, Budget& budget);
};

// The state of a running {% for %}, which the template sees as `loop`.
struct LoopState {
  const Statement* statement = nullptr;
  std::shared_ptr<Scope> scope;  // the scope around the loop; null after the loop has ended
  std::vector<Value> source;
  size_t next_source = 0;     // index of the next item of `source`
  std::deque<Value> pending;  // items already read from `source` for loop.last, loop.nextitem and loop.length
  int64_t index0 = -1;
  int64_t depth0 = 0;
  Value current, previous, changed;  // changed: the arguments of the last loop.changed() as a tuple
  int depth_of_items = 1;            // 1 + the largest depth of an item or of `changed`
};

// A macro value: the definition and the scope in which the macro was defined.
struct Macro {
  const MacroDefinition* tree = nullptr;
  std::shared_ptr<Scope> scope;
};

class Evaluator {
 public:
  // strftime_now prints `time` in UTC. Without `time` it prints the machine's clock in the local time zone.
  explicit Evaluator(Budget budget, std::optional<std::time_t> time = {}) : budget_(budget), time_(time) {}
  ~Evaluator();
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  void define(std::string name, Value value);  // defines a variable of the whole template
  std::optional<std::time_t> time() const { return time_; }
  std::string run(const Body& body);  // renders the template; call it once
  const std::vector<std::pair<size_t, size_t>>& generation_spans() const { return generation_spans_; }
  int line() const { return line_; }

  Budget& budget() { return budget_; }
  // These functions create a value and charge the budget for it. RenderError when the value exceeds a limit of the
  // budget, or the budget is used up.
  Value make_text(std::string text, bool markup = false);
  Value make_list(std::vector<Value> items, ValueKind kind = ValueKind::kList);
  Value make_dict(std::shared_ptr<const Dict> dict);
  Value make_namespace(std::shared_ptr<Dict> attributes);
  // What a template gets for `of.name` and `of[key]` under the rules of the sandbox; an undefined value when there is
  // none.
  Value attribute(const Value& of, const std::string& name);
  Value item(const Value& of, const Value& key);
  Value call(const Value& callee, const Arguments& arguments);
  std::string text_of(const Value& value) { return to_text(value, budget_); }

 private:
  enum class Flow { kNormal, kBreak, kContinue };
  // running_depth_ + 1. RenderError when this exceeds the limit.
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
  Arguments evaluate_arguments(const Expression& node);  // `node`: a call, filter or test; sets line_ to its line
  Value loop_attribute(const Value& loop, const std::string& name);
  std::optional<Value> own_attribute(const Value& of, const std::string& name);

  Flow execute(const Body& body);
  Flow execute(const Statement& statement);
  Flow execute_if(const Statement& statement);
  Flow execute_for(const Statement& statement, std::vector<Value> items, int64_t depth0);
  void execute_call_block(const Statement& statement);
  Value render_filtered_block(const Statement& statement);  // the output of its body, passed through its filters
  void execute_with(const Statement& statement);
  void execute_generation(const Statement& statement);
  void assign(const AssignmentTarget& target, Value value);
  bool read_next_item(LoopState& loop, Value& value);
  bool has_next_item(LoopState& loop);
  Value call_macro(const Macro& macro, const Arguments& arguments);
  void bind_parameters(const MacroDefinition& tree, const Arguments& arguments);
  Value call_loop(const Value& loop, const Arguments& arguments);
  Value make_macro(const std::shared_ptr<const MacroDefinition>& definition);

  void emit(std::string_view text);
  std::string render_to_string(const Body& body);  // executes the body and returns its output
  void set_variable(std::string_view name, Value value);
  std::shared_ptr<Scope> inner_scope(std::shared_ptr<Scope> parent);

  Budget budget_;
  std::optional<std::time_t> time_;
  int line_ = 0;
  int running_depth_ = 0;  // depth of C++ recursion over expressions and statements, with all running macros
  int macro_depth_ = 0;    // number of running macros and recursive loop calls
  std::shared_ptr<Scope> scope_ = std::make_shared<Scope>();
  std::string* out_ = nullptr;
  std::string root_out_;
  std::vector<std::pair<size_t, size_t>> generation_spans_;
  std::deque<std::string> names_;
  // Namespaces and captured scopes can own themselves through values. The destructor empties them to break such cycles.
  std::vector<std::shared_ptr<Namespace>> namespaces_;
  std::vector<std::shared_ptr<Scope>> captured_scopes_;
};

}  // namespace tessera::text::jinja
