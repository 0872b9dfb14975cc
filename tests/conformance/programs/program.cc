#include "tests/conformance/programs/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace tessera::testing {

namespace {

constexpr std::array<std::pair<c10::ScalarType, const char*>, 11> kTypes{{{c10::ScalarType::Double, "f64"},
                                                                          {c10::ScalarType::Float, "f32"},
                                                                          {c10::ScalarType::BFloat16, "bf16"},
                                                                          {c10::ScalarType::Half, "f16"},
                                                                          {c10::ScalarType::ComplexDouble, "c128"},
                                                                          {c10::ScalarType::ComplexFloat, "c64"},
                                                                          {c10::ScalarType::Long, "i64"},
                                                                          {c10::ScalarType::Int, "i32"},
                                                                          {c10::ScalarType::Short, "i16"},
                                                                          {c10::ScalarType::Byte, "u8"},
                                                                          {c10::ScalarType::Bool, "bool"}}};
constexpr std::array<std::pair<Fill::Kind, const char*>, 5> kFills{{{Fill::Kind::kUniform, "uniform"},
                                                                    {Fill::Kind::kDistinct, "distinct"},
                                                                    {Fill::Kind::kBelow, "below"},
                                                                    {Fill::Kind::kPermutation, "permutation"},
                                                                    {Fill::Kind::kFlags, "flags"}}};

template <class... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};
template <class... Visitors>
Overloaded(Visitors...) -> Overloaded<Visitors...>;

std::string number(double x) {
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  std::string text = fmt::format("{}", x);
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}

std::string spelled(const std::vector<Arg>& args);

std::string spelled(const Arg& arg) {
  return std::visit(Overloaded{[](const Arg::None&) { return std::string("None"); },
                               [](const Arg::Ref& r) { return fmt::format("%{}", r.id); },
                               [](int64_t n) { return fmt::format("{}", n); }, [](double x) { return number(x); },
                               [](bool b) { return std::string(b ? "true" : "false"); },
                               [](const std::string& s) { return "\"" + s + "\""; },
                               [](const Arg::Dtype& d) { return std::string(short_name(d.type)); },
                               [](const Arg::List& list) { return "[" + spelled(list) + "]"; }},
                    arg.value);
}

std::string spelled(const std::vector<Arg>& args) {
  std::string text;
  for (const auto& arg : args) text += (text.empty() ? "" : ", ") + spelled(arg);
  return text;
}

std::string spelled(const Fill& fill) {
  std::string name;
  for (const auto& [kind, text] : kFills) name = kind == fill.kind ? text : name;
  if (fill.kind == Fill::Kind::kUniform) return fmt::format("{} {} {}", name, fill.low, fill.high);
  return fill.kind == Fill::Kind::kBelow ? fmt::format("{} {}", name, fill.below) : name;
}

// Reads one line.
class Reader {
 public:
  explicit Reader(const std::string& line) : line_(line) {}

  bool at_end() {
    skip();
    return at_ >= line_.size();
  }
  bool take(const std::string& text) {
    skip();
    if (line_.compare(at_, text.size(), text) != 0) return false;
    at_ += text.size();
    return true;
  }
  void need(const std::string& text) {
    if (!take(text)) fail("'" + text + "'");
  }
  [[noreturn]] void fail(const std::string& wanted) const {
    throw std::runtime_error(fmt::format("program: wanted {} at column {} of: {}", wanted, at_ + 1, line_));
  }
  std::string name() {
    skip();
    const size_t from = at_;
    while (at_ < line_.size() && (std::isalnum(static_cast<unsigned char>(line_[at_])) != 0 || line_[at_] == '_' ||
                                  line_[at_] == '.' || line_[at_] == ':')) {
      ++at_;
    }
    if (from == at_) fail("a name");
    return line_.substr(from, at_ - from);
  }
  int64_t integer() { return std::stoll(digits()); }
  double real() { return std::stod(digits()); }
  int id() {
    need("%");
    return static_cast<int>(integer());
  }
  std::vector<int64_t> sizes() {
    std::vector<int64_t> values;
    need("[");
    while (!take("]")) {
      values.push_back(integer());
      take(",");
    }
    return values;
  }
  Placement placement();
  Placements placements() {
    Placements list;
    need("(");
    while (!take(")")) {
      list.push_back(placement());
      take(",");
    }
    return list;
  }
  c10::ScalarType type() {
    const std::string text = name();
    for (const auto& [type, known] : kTypes) {
      if (text == known) return type;
    }
    fail("a type");
  }
  Fill fill();
  Arg arg();
  std::vector<Arg> args(const std::string& end) {
    std::vector<Arg> list;
    while (!take(end)) {
      list.push_back(arg());
      take(",");
    }
    return list;
  }

 private:
  void skip() {
    while (at_ < line_.size() && line_[at_] == ' ') ++at_;
  }
  std::string digits() {
    skip();
    const size_t from = at_;
    while (at_ < line_.size() && (std::isdigit(static_cast<unsigned char>(line_[at_])) != 0 ||
                                  std::string("+-.einf").find(line_[at_]) != std::string::npos)) {
      ++at_;
    }
    if (from == at_) fail("a number");
    return line_.substr(from, at_ - from);
  }

  const std::string& line_;
  size_t at_ = 0;
};

Placement Reader::placement() {
  if (take("_S(")) {
    const int64_t dim = integer();
    need(",");
    const int64_t factor = integer();
    need(")");
    return StridedShard(dim, factor);
  }
  if (take("S(")) {
    const int64_t dim = integer();
    need(")");
    return Shard(dim);
  }
  if (take("_NormP(")) {
    const double order = real();
    need(")");
    return NormPartial(static_cast<float>(order));
  }
  if (take("P(")) {
    const std::string op = name();
    need(")");
    for (const auto known : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      if (op == comm::to_string(known)) return Partial(known);
    }
    fail("a reduction");
  }
  need("R");
  return Replicate();
}

Fill Reader::fill() {
  Fill fill;
  const std::string text = name();
  const auto* found = std::ranges::find_if(kFills, [&](const auto& one) { return text == one.second; });
  if (found == kFills.end()) fail("what the input holds");
  fill.kind = found->first;
  if (fill.kind == Fill::Kind::kUniform) {
    fill.low = real();
    fill.high = real();
  } else if (fill.kind == Fill::Kind::kBelow) {
    fill.below = integer();
  }
  return fill;
}

Arg Reader::arg() {
  if (take("%")) return ref(static_cast<int>(integer()));
  if (take("[")) return {Arg::List(args("]"))};
  if (take("\"")) {
    const size_t from = at_;
    at_ = std::min(line_.find('"', at_), line_.size());
    std::string text = line_.substr(from, at_ - from);
    need("\"");
    return word(std::move(text));
  }
  if (take("None")) return none();
  if (take("true")) return flag(true);
  if (take("false")) return flag(false);
  for (const auto& [type, known] : kTypes) {
    if (take(known)) return type_arg(type);
  }
  const std::string text = digits();
  return text.find_first_of(".einf") == std::string::npos ? num(static_cast<int64_t>(std::stoll(text)))
                                                          : num(std::stod(text));
}

Step parse_step(Reader& in) {
  Step step;
  do {
    step.results.push_back(in.id());
  } while (in.take(","));
  in.need("=");
  const std::string op = in.name();
  if (op == "input") {
    step.kind = Step::Kind::kInput;
    step.type = in.type();
    step.sizes = in.sizes();
    step.fill = in.fill();
    step.placements = in.placements();
    step.grad = in.take("grad");
    return step;
  }
  in.need("(");
  if (op == "redistribute") {
    step.kind = Step::Kind::kRedistribute;
    step.args.push_back(ref(in.id()));
    in.need(",");
    step.placements = in.placements();
    in.need(")");
    step.async = in.take("async");
    return step;
  }
  step.op = op;
  step.args = in.args(")");
  return step;
}

}  // namespace

Arg refs(const std::vector<int>& ids) {
  Arg::List list;
  for (const int id : ids) list.push_back(ref(id));
  return {list};
}

Arg ints(const std::vector<int64_t>& values) {
  Arg::List list;
  for (const int64_t value : values) list.push_back(num(value));
  return {list};
}

const char* short_name(c10::ScalarType type) {
  for (const auto& [known, text] : kTypes) {
    if (known == type) return text;
  }
  return c10::toString(type);
}

std::vector<int> refs_of(const std::vector<Arg>& args) {
  std::vector<int> ids;
  for (const auto& arg : args) {
    if (const auto* one = std::get_if<Arg::Ref>(&arg.value)) {
      ids.push_back(one->id);
    } else if (const auto* list = std::get_if<Arg::List>(&arg.value)) {
      const auto more = refs_of(*list);
      ids.insert(ids.end(), more.begin(), more.end());
    }
  }
  return ids;
}

int Program::value_count() const {
  int count = 0;
  for (const auto& step : steps) {
    for (const int id : step.results) count = std::max(count, id + 1);
  }
  return count;
}

int Program::calls() const {
  return static_cast<int>(std::ranges::count_if(steps, [](const Step& s) { return s.kind != Step::Kind::kInput; }));
}

std::string to_text(const Step& step) {
  std::string text;
  for (const int id : step.results) text += fmt::format("{}%{}", text.empty() ? "" : ", ", id);
  text += text.empty() ? "" : " = ";
  switch (step.kind) {
    case Step::Kind::kInput:
      text += fmt::format("input {} [", short_name(step.type));
      for (size_t i = 0; i < step.sizes.size(); ++i) text += fmt::format("{}{}", i == 0 ? "" : ", ", step.sizes[i]);
      return text + fmt::format("] {} {}{}", spelled(step.fill), to_string(step.placements), step.grad ? " grad" : "");
    case Step::Kind::kRedistribute:
      return text + fmt::format("redistribute({}, {}){}", spelled(step.args[0]), to_string(step.placements),
                                step.async ? " async" : "");
    case Step::Kind::kCall:
      return text + fmt::format("{}({})", step.op, spelled(step.args));
  }
  return text;
}

std::string to_text(const Program& program) {
  std::string text = "mesh";
  for (const int64_t size : program.mesh) text += fmt::format(" {}", size);
  text += fmt::format("\nvalues {}\n", program.values);
  for (const auto& step : program.steps) text += to_text(step) + "\n";
  for (size_t i = 0; i < program.flows.size(); ++i) {
    text += fmt::format("{}%{} {}", i == 0 ? "backward " : ", ", program.flows[i].id,
                        to_string(program.flows[i].placements));
  }
  return text + (program.flows.empty() ? "" : "\n") + (program.twice ? "twice\n" : "");
}

Program parse_program(const std::string& text) {
  Program program;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    Reader in(line);
    if (in.at_end() || line[0] == '#') continue;
    if (line[0] == '%') {
      program.steps.push_back(parse_step(in));
    } else if (in.take("mesh")) {
      while (!in.at_end()) program.mesh.push_back(in.integer());
    } else if (in.take("values")) {
      program.values = static_cast<uint64_t>(in.integer());
    } else if (in.take("twice")) {
      program.twice = true;
    } else if (in.take("backward")) {
      do {
        const int id = in.id();
        program.flows.push_back({id, in.placements()});
      } while (in.take(","));
    } else {  // a call without results
      Step step;
      step.op = in.name();
      in.need("(");
      step.args = in.args(")");
      program.steps.push_back(std::move(step));
    }
    if (!in.at_end()) in.fail("the end of the line");
  }
  return program;
}

}  // namespace tessera::testing
