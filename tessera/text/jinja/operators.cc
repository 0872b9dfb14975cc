// Arithmetic, comparisons and slices of values, with Python's rules. Integers have 64 bits; an overflow is a failure.
#include <cmath>

#include "tessera/text/jinja/evaluator.h"
#include "tessera/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

const char* symbol(Operator op) {
  static constexpr const char* kSymbols[] = {"+", "-", "*", "/", "//", "%", "**"};
  return kSymbols[static_cast<size_t>(op)];
}

void check_fits(bool overflowed) {
  if (overflowed) fail("an integer does not fit in 64 bits");
}

int64_t product(int64_t a, int64_t b) {
  int64_t result = 0;
  check_fits(__builtin_mul_overflow(a, b, &result));
  return result;
}

// Computes the power by square and multiply. The last square is skipped, because it may overflow although the result
// does not.
int64_t power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  while (exponent > 0) {
    if (exponent & 1) result = product(result, base);
    exponent >>= 1;
    if (exponent > 0) base = product(base, base);
  }
  return result;
}

Value integers(Operator op, int64_t a, int64_t b) {
  int64_t result = 0;
  switch (op) {
    case Operator::kAdd:
      check_fits(__builtin_add_overflow(a, b, &result));
      return Value::integer(result);
    case Operator::kSubtract:
      check_fits(__builtin_sub_overflow(a, b, &result));
      return Value::integer(result);
    case Operator::kMultiply:
      return Value::integer(product(a, b));
    case Operator::kDivide:
      if (b == 0) fail("division by zero");
      return Value::real(static_cast<double>(a) / static_cast<double>(b));
    case Operator::kFloorDivide:
    case Operator::kModulo: {
      if (b == 0) fail("division by zero");
      // Python rounds the quotient down, C++ towards zero. INT64_MIN / -1 would overflow.
      if (b == -1) return op == Operator::kModulo ? Value::integer(0) : integers(Operator::kSubtract, 0, a);
      int64_t quotient = a / b, rest = a % b;
      if (rest != 0 && (rest < 0) != (b < 0)) {
        --quotient;
        rest += b;
      }
      return Value::integer(op == Operator::kModulo ? rest : quotient);
    }
    default:
      if (b < 0) return Value::real(std::pow(static_cast<double>(a), static_cast<double>(b)));
      return Value::integer(power(a, b));
  }
}

Value reals(Operator op, double a, double b) {
  switch (op) {
    case Operator::kAdd:
      return Value::real(a + b);
    case Operator::kSubtract:
      return Value::real(a - b);
    case Operator::kMultiply:
      return Value::real(a * b);
    case Operator::kPower:
      return Value::real(std::pow(a, b));
    default:
      break;
  }
  if (b == 0) fail("division by zero");
  if (op == Operator::kDivide) return Value::real(a / b);
  if (op == Operator::kFloorDivide) return Value::real(std::floor(a / b));
  const double rest = std::fmod(a, b);
  return Value::real(rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest);
}

// Joins two strings. When one of them is markup, the other one is escaped, as in markupsafe.
Value joined_texts(Evaluator& evaluator, const Value& left, const Value& right) {
  const bool markup = left.is_markup() || right.is_markup();
  const auto part = [&](const Value& value) {
    return markup && !value.is_markup() ? html_escaped(value.as_text()) : value.as_text();
  };
  evaluator.budget().check_size(left.as_text().size() + right.as_text().size());
  return evaluator.make_text(part(left) + part(right), markup);
}

// Makes a list whose memory was charged to the budget before.
Value make_charged_list(Evaluator& evaluator, std::vector<Value> items, ValueKind kind) {
  Value made = Value::list(std::move(items), kind);
  evaluator.budget().check_depth(made.depth());
  return made;
}

Value repeated(Evaluator& evaluator, const Value& value, int64_t times) {
  const auto count = static_cast<size_t>(times < 0 ? 0 : times);
  const size_t size = value.is(ValueKind::kString) ? value.as_text().size() : value.items().size();
  size_t total = 0;
  if (__builtin_mul_overflow(count, size, &total)) fail("a repeated value does not fit in memory");
  evaluator.budget().check_size(total);
  if (value.is(ValueKind::kString)) {
    std::string text;
    text.reserve(total);
    for (size_t i = 0; size > 0 && i < count; ++i) text += value.as_text();
    return evaluator.make_text(std::move(text), value.is_markup());
  }
  evaluator.budget().charge(total * sizeof(Value));  // charged before the items are created
  std::vector<Value> items;
  items.reserve(total);
  for (size_t i = 0; size > 0 && i < count; ++i) items.insert(items.end(), value.items().begin(), value.items().end());
  return make_charged_list(evaluator, std::move(items), value.kind());
}

bool repeatable(const Value& value) {
  return value.is(ValueKind::kString) || value.is(ValueKind::kList) || value.is(ValueKind::kTuple);
}

// The start, stop and step of a slice, like the result of Python's slice.indices(length).
struct SliceIndices {
  int64_t start, stop, step;
};

// The index of one bound of a slice, clamped to the sequence. A negative bound counts from the end. With a negative
// step (`backwards`) the index may be -1, which is in front of the first element. Returns `missing` for None.
int64_t bound_of(const Value& value, int64_t length, int64_t missing, bool backwards) {
  if (value.is(ValueKind::kNone)) return missing;
  if (!value.is_integral()) fail("slice indices must be integers or None");
  int64_t at = value.as_int();
  const int64_t low = backwards ? -1 : 0;
  const int64_t high = backwards ? length - 1 : length;
  if (at < 0) at = at < -length ? -1 : at + length;
  return std::clamp(at, low, high);
}

SliceIndices indices(const Value& start, const Value& stop, const Value& step, int64_t length) {
  if (!step.is(ValueKind::kNone) && !step.is_integral()) fail("slice indices must be integers or None");
  SliceIndices made{0, 0, step.is(ValueKind::kNone) ? 1 : step.as_int()};
  if (made.step == 0) fail("slice step cannot be zero");
  made.step = std::clamp<int64_t>(made.step, -length - 1, length + 1);
  const bool backwards = made.step < 0;
  made.start = bound_of(start, length, backwards ? length - 1 : 0, backwards);
  made.stop = bound_of(stop, length, backwards ? -1 : length, backwards);
  return made;
}

template <class Visit>
void for_each_index(const SliceIndices& of, Visit visit) {
  for (int64_t i = of.start; of.step > 0 ? i < of.stop : i > of.stop; i += of.step) visit(static_cast<size_t>(i));
}

}  // namespace

// Python's operator rules: arithmetic operators take two numbers; + also joins two strings, two lists or two tuples; *
// also repeats a string, list or tuple; % with a string on the left formats the string.
Value binary(Evaluator& evaluator, Operator op, const Value& left, const Value& right) {
  if (left.is(ValueKind::kUndefined)) fail("{}", left.hint());
  if (left.is_number() && right.is_number()) {
    check_fits(left.is(ValueKind::kBigInt) || right.is(ValueKind::kBigInt));
    if (left.is_integral() && right.is_integral()) return integers(op, left.as_int(), right.as_int());
    return reals(op, left.as_double(), right.as_double());
  }
  if (op == Operator::kModulo && left.is(ValueKind::kString)) {
    return evaluator.make_text(format_percent(left.as_text(), right, evaluator.budget()), left.is_markup());
  }
  if (right.is(ValueKind::kUndefined)) fail("{}", right.hint());
  if (op == Operator::kAdd && left.kind() == right.kind()) {
    if (left.is(ValueKind::kString)) return joined_texts(evaluator, left, right);
    if (left.is(ValueKind::kList) || left.is(ValueKind::kTuple)) {
      const size_t total = left.items().size() + right.items().size();
      evaluator.budget().check_size(total);
      evaluator.budget().charge(total * sizeof(Value));  // before the items are copied
      std::vector<Value> items = left.items();
      items.insert(items.end(), right.items().begin(), right.items().end());
      return make_charged_list(evaluator, std::move(items), left.kind());
    }
  }
  if (op == Operator::kMultiply) {
    if (repeatable(left) && right.is_integral()) return repeated(evaluator, left, right.as_int());
    if (repeatable(right) && left.is_integral()) return repeated(evaluator, right, left.as_int());
  }
  fail("unsupported operands for {}: '{}' and '{}'", symbol(op), type_name(left), type_name(right));
}

bool compare(Operator op, const Value& left, const Value& right, Budget& budget) {
  switch (op) {
    case Operator::kEqual:
      return equal(left, right, budget);
    case Operator::kNotEqual:
      return !equal(left, right, budget);
    case Operator::kLess:
      return less(left, right, budget);
    case Operator::kLessEqual:
      return less(left, right, budget) || equal(left, right, budget);
    case Operator::kGreater:
      return less(right, left, budget);
    case Operator::kGreaterEqual:
      return less(right, left, budget) || equal(left, right, budget);
    case Operator::kIn:
      return contains(right, left, budget);
    case Operator::kNotIn:
      return !contains(right, left, budget);
    default:
      fail("an operator that compares nothing");
  }
}

Value slice(Evaluator& evaluator, const Value& of, const Value& start, const Value& stop, const Value& step) {
  switch (of.kind()) {
    case ValueKind::kUndefined:
      fail("{}", of.hint());
    case ValueKind::kString: {
      const std::string& text = of.as_text();
      const SliceIndices range = indices(start, stop, step, length_of(of, evaluator.budget()));
      evaluator.budget().charge(text.size());
      std::string out;
      if (range.step == 1) {
        if (range.start >= range.stop) return Value::text("", of.is_markup());
        const auto first = static_cast<size_t>(range.start), count = static_cast<size_t>(range.stop - range.start);
        if (of.is_ascii()) return evaluator.make_text(text.substr(first, count), of.is_markup());
        const size_t begin = byte_offset(text, first);
        const size_t bytes = byte_offset(std::string_view(text).substr(begin), count);
        return evaluator.make_text(text.substr(begin, bytes), of.is_markup());
      }
      std::vector<std::string_view> points;
      for_each_code_point(text, [&](std::string_view one, int32_t) { points.push_back(one); });
      for_each_index(range, [&](size_t i) { out += points[i]; });
      return evaluator.make_text(std::move(out), of.is_markup());
    }
    case ValueKind::kList:
    case ValueKind::kTuple:
    case ValueKind::kRange: {
      const SliceIndices range = indices(start, stop, step, static_cast<int64_t>(of.items().size()));
      std::vector<Value> items;
      for_each_index(range, [&](size_t i) { items.push_back(of.items()[i]); });
      return evaluator.make_list(std::move(items), of.kind());
    }
    default:
      return Value::undefined(fmt::format("a {} cannot be sliced", type_name(of)));
  }
}

}  // namespace tessera::text::jinja
