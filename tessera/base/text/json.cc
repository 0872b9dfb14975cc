#include "tessera/base/text/json.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tessera/base/text/json_numbers.h"
#include "tessera/base/text/quote.h"

namespace tessera {
namespace {

constexpr size_t kShownBytes = 60;

constexpr int kOverflow = 406;  // nlohmann's id of the error "number overflow"

// Passes nlohmann's parser events to a JsonBuilder. `replaced` has the original digits of the numbers that
// without_overflowing_numbers() has replaced in the text, by their position among all numbers of the text. The handler
// passes these digits to the builder.
class JsonEventHandler {
 public:
  using Replaced = std::map<size_t, std::string>;
  explicit JsonEventHandler(JsonBuilder& builder, bool exact = false, const Replaced* replaced = nullptr)
      : builder_(builder), exact_(exact), replaced_(replaced) {}
  bool null() { return add_value(nullptr); }
  bool boolean(bool value) { return add_value(value); }
  bool number_integer(int64_t value) { return number(value); }
  bool number_unsigned(uint64_t value) { return number(value); }
  bool number_float(double value, const std::string& digits) {
    return exact_ && is_integer_text(digits) ? number(exact_number(digits)) : number(value);
  }
  bool string(std::string& value) { return add_value(std::move(value)); }
  bool binary(Json::binary_t&) { return false; }
  bool key(std::string& value) {
    builder_.key(value);
    return true;
  }
  bool start_object(size_t) { return opened(Json::object()); }
  bool start_array(size_t) { return opened(Json::array()); }
  bool end_object() { return closed(); }
  bool end_array() { return closed(); }
  // With `exact`, the first number that overflows a double stops the parse without an error; parse_json() then parses a
  // text in which such numbers are replaced.
  bool parse_error(size_t byte, const std::string&, const nlohmann::detail::exception& error) {
    overflowed_ = exact_ && !replaced_ && error.id == kOverflow;
    if (!overflowed_) builder_.syntax_error(byte, error.what());
    return false;
  }
  bool overflowed() const { return overflowed_; }

 private:
  template <class T>
  bool number(T&& value) {
    const size_t position = numbers_++;
    const auto found = replaced_ ? replaced_->find(position) : Replaced::const_iterator{};
    if (replaced_ && found != replaced_->end()) return add_value(exact_number(found->second));
    return add_value(std::forward<T>(value));
  }
  template <class T>
  bool add_value(T&& value) {
    builder_.value(Json(std::forward<T>(value)));
    return true;
  }
  bool opened(Json container) {
    builder_.open(std::move(container));
    return true;
  }
  bool closed() {
    builder_.close();
    return true;
  }
  JsonBuilder& builder_;
  const bool exact_;
  const Replaced* replaced_;
  size_t numbers_ = 0;
  bool overflowed_ = false;
};

// Keeps the last value of each key, at the position of the key's first occurrence, like Python. Sorting the positions
// makes this n log n for hostile objects with many equal keys.
void drop_repeated_keys(Json::object_t& object) {
  std::vector<size_t> order(object.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto before = [&](size_t a, size_t b) {
    const int compared = object.data()[a].first.compare(object.data()[b].first);
    return compared != 0 ? compared < 0 : a < b;
  };
  std::ranges::sort(order, before);
  const auto same = [&](size_t a, size_t b) { return object.data()[a].first == object.data()[b].first; };
  if (std::ranges::adjacent_find(order, same) == order.end()) return;
  std::vector<size_t> last(object.size());  // for the first occurrence of a key: position of its last one
  std::vector<bool> repeated(object.size());
  for (size_t i = 0; i < order.size();) {
    size_t end = i + 1;
    for (; end < order.size() && same(order[i], order[end]); ++end) repeated[order[end]] = true;
    last[order[i]] = order[end - 1];
    i = end;
  }
  Json::object_t kept;
  for (size_t i = 0; i < object.size(); ++i) {
    if (!repeated[i]) {
      kept.Json::object_t::Container::emplace_back(object.data()[i].first, std::move(object.data()[last[i]].second));
    }
  }
  object = std::move(kept);
}

}  // namespace

JsonBuilder::JsonBuilder(Json& root, std::string where, const JsonLimits& limits)
    : root_(root), where_(std::move(where)), limits_(limits) {}

// Limits are checked at each event, before the value is stored, so a hostile text is rejected early.
void JsonBuilder::enter() {
  TESSERA_CHECK(++depth_ <= limits_.max_depth, ErrorKind::kFormat, "{}: the JSON is nested deeper than {} levels",
                where_, limits_.max_depth);
}

void JsonBuilder::count_key() {
  TESSERA_CHECK(++keys_ <= limits_.max_keys, ErrorKind::kFormat, "{}: the JSON holds more than {} keys", where_,
                limits_.max_keys);
}

Json& JsonBuilder::append(Json value) {
  if (open_.empty()) return root_ = std::move(value);
  Json& parent = *open_.back();
  if (auto* array = parent.get_ptr<Json::array_t*>()) return array->emplace_back(std::move(value));
  // Appends to the underlying vector, because ordered_map's own insertion compares with every key. close() removes
  // repeated keys.
  auto& object = static_cast<Json::object_t::Container&>(parent.get_ref<Json::object_t&>());
  return object.emplace_back(std::move(key_), std::move(value)).second;
}

void JsonBuilder::value(Json value) { append(std::move(value)); }

void JsonBuilder::key(std::string& key) {
  count_key();
  key_ = std::move(key);
}

void JsonBuilder::open(Json container) {
  enter();
  open_.push_back(&append(std::move(container)));
}

void JsonBuilder::close() {
  leave();
  auto* object = open_.back()->get_ptr<Json::object_t*>();
  if (object && object->size() > 1) drop_repeated_keys(*object);
  open_.pop_back();
}

namespace {

// The parser's message without its prefix (parser name and error id).
std::string_view syntax_reason(std::string_view reason) {
  const auto cut = reason.find("syntax error");
  return cut == std::string_view::npos ? reason : reason.substr(cut);
}

}  // namespace

void JsonBuilder::syntax_error(size_t byte, std::string_view reason) const {
  raise(ErrorKind::kFormat, "{}: byte {}: no valid JSON: {}", where_, byte, escape(syntax_reason(reason), 200));
}

namespace {

// Ignores all parser events except the error.
struct SyntaxErrorHandler : nlohmann::detail::json_sax_acceptor<Json> {
  std::optional<JsonSyntaxError> syntax_error;

  bool parse_error(size_t byte, const std::string&, const nlohmann::detail::exception& error) {
    syntax_error = JsonSyntaxError{byte, std::string(syntax_reason(error.what()))};
    return false;
  }
};

}  // namespace

std::optional<JsonSyntaxError> find_json_syntax_error(std::string_view text) {
  SyntaxErrorHandler events;
  Json::sax_parse(text.begin(), text.end(), &events);
  return events.syntax_error;
}

// nlohmann treats a number that overflows a double as an error. With exact_numbers the text is parsed a second time,
// with such numbers replaced by finite ones of the same length, so byte positions in messages stay correct.
Json parse_json(std::string_view text, const std::string& where, const JsonLimits& limits) {
  TESSERA_CHECK(text.size() <= limits.max_bytes, ErrorKind::kFormat, "{}: {} bytes of JSON, at most {} are allowed",
                where, text.size(), limits.max_bytes);
  Json root;
  {
    JsonBuilder builder(root, where, limits);
    JsonEventHandler events(builder, limits.exact_numbers);
    Json::sax_parse(text.begin(), text.end(), &events);
    if (!events.overflowed()) return root;
  }
  const auto finite = without_overflowing_numbers(text);
  JsonBuilder builder(root, where, limits);
  JsonEventHandler events(builder, true, &finite.replaced_digits);
  Json::sax_parse(finite.text.begin(), finite.text.end(), &events);
  return root;
}

Json parse_json_object(std::string_view text, const std::string& where, const JsonLimits& limits) {
  Json root = parse_json(text, where, limits);
  TESSERA_CHECK(root.is_object(), ErrorKind::kFormat, "{}: is not a JSON object, but {}", where, describe(root));
  return root;
}

std::string describe(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::object:
      return fmt::format("an object of {} keys", value.size());
    case Json::value_t::array:
      return fmt::format("an array of {} values", value.size());
    case Json::value_t::boolean:
      return value.get<bool>() ? "true" : "false";
    case Json::value_t::string:
      return "\"" + escape(value.get_ref<const std::string&>(), kShownBytes) + "\"";
    case Json::value_t::binary:
      return escape(*exact_digits(value), kShownBytes);
    default:
      return value.dump();
  }
}

JsonReader::JsonReader(const Json& value, std::string where, ErrorKind kind)
    : value_(&value), origin_(std::make_shared<const Origin>(Origin{std::move(where), kind})) {}

JsonReader::JsonReader(const Json& value, const JsonReader& around, ParentLink link)
    : value_(&value), origin_(around.origin_), link_(std::make_shared<const ParentLink>(std::move(link))) {}

JsonReader JsonReader::child(std::string_view key, const Json& value) const {
  return {value, *this, ParentLink{.parent = link_, .key = key, .index = 0, .is_index = false}};
}

// Returns the path of the reader's value in the document, such as a.b[2]. Only error messages need the path, so it is
// built here and not stored. A reader stores a ParentLink, which points to the ParentLink of the parent reader.
std::string JsonReader::path() const {
  std::vector<const ParentLink*> links;
  for (const auto* link = link_.get(); link; link = link->parent.get()) links.push_back(link);
  std::string path;
  for (auto link = links.rbegin(); link != links.rend(); ++link) {
    if ((*link)->is_index) {
      path += "[" + std::to_string((*link)->index) + "]";
    } else {
      path += (path.empty() ? "" : ".") + escape((*link)->key, kShownBytes);
    }
  }
  return path;
}

std::string JsonReader::path_of(std::string_view key) const {
  const auto around = path();
  return around.empty() ? escape(key, kShownBytes) : around + "." + escape(key, kShownBytes);
}

std::string JsonReader::name() const { return link_ ? origin_->where + ": " + path() : origin_->where; }
bool JsonReader::is_null() const { return value_->is_null(); }
bool JsonReader::is_object() const { return value_->is_object(); }
bool JsonReader::is_array() const { return value_->is_array(); }

void JsonReader::fail(std::string_view found, std::string_view expected) const {
  raise(origin_->kind, "{}: found {}, wanted {}", name(), found, expected);
}
void JsonReader::fail(std::string_view expected) const { fail(describe(*value_), expected); }

std::string JsonReader::as_string() const {
  if (!value_->is_string()) fail("a string");
  return value_->get<std::string>();
}

bool JsonReader::as_boolean() const {
  if (!value_->is_boolean()) fail("true or false");
  return value_->get<bool>();
}

int64_t JsonReader::as_integer(int64_t min_value, int64_t max_value) const {
  const bool whole = value_->is_number_integer() &&
                     (!value_->is_number_unsigned() || value_->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
  const int64_t found = whole ? value_->get<int64_t>() : 0;
  if (!whole || found < min_value || found > max_value) {
    fail(fmt::format("an integer from {} to {}", min_value, max_value));
  }
  return found;
}

uint64_t JsonReader::as_unsigned() const {
  if (!value_->is_number_unsigned()) fail("an unsigned integer");
  return value_->get<uint64_t>();
}

double JsonReader::as_number(double min_value, double max_value) const {
  const auto digits = exact_digits(*value_);
  const bool is_number = digits || value_->is_number();
  const double found = digits ? nearest_double(*digits) : is_number ? value_->get<double>() : 0;
  if (!is_number || !(found >= min_value && found <= max_value)) {
    fail(fmt::format("a number from {} to {}", min_value, max_value));
  }
  return found;
}

std::vector<JsonReader> JsonReader::items() const {
  if (!value_->is_array()) fail("an array");
  std::vector<JsonReader> result;
  result.reserve(value_->size());
  for (size_t i = 0; i < value_->size(); ++i) {
    result.push_back({(*value_)[i], *this, ParentLink{.parent = link_, .key = {}, .index = i, .is_index = true}});
  }
  return result;
}

std::vector<std::pair<std::string, JsonReader>> JsonReader::members() const {
  if (!value_->is_object()) fail("an object");
  std::vector<std::pair<std::string, JsonReader>> result;
  result.reserve(value_->size());
  for (const auto& [key, value] : value_->get_ref<const Json::object_t&>()) result.emplace_back(key, child(key, value));
  return result;
}

const Json* JsonReader::value_of(std::string_view key, std::string_view* stored_key) const {
  if (!value_->is_object()) fail("an object");
  const auto& object = value_->get_ref<const Json::object_t&>();
  const auto found = std::ranges::find_if(object, [&](const auto& each) { return each.first == key; });
  if (found == object.end()) return nullptr;
  if (stored_key) *stored_key = found->first;
  return &found->second;
}

bool JsonReader::has(std::string_view key) const {
  const Json* found = value_of(key);
  return found && !found->is_null();
}

std::optional<JsonReader> JsonReader::member(std::string_view key) const {
  std::string_view stored_key;
  const Json* found = value_of(key, &stored_key);
  if (!found) return std::nullopt;
  return child(stored_key, *found);
}

JsonReader JsonReader::at(std::string_view key) const {
  const auto found = member(key);
  TESSERA_CHECK(found, origin_->kind, "{}: {} is missing", origin_->where, path_of(key));
  return *found;
}

std::optional<JsonReader> JsonReader::find(std::string_view key) const {
  auto found = member(key);
  if (found && found->is_null()) found.reset();
  return found;
}

JsonReader JsonReader::require(std::string_view key) const {
  const auto found = find(key);
  TESSERA_CHECK(found, origin_->kind, "{}: {} is missing", origin_->where, path_of(key));
  return *found;
}

std::string JsonReader::string(std::string_view key, std::optional<std::string_view> default_value) const {
  return default_value && !has(key) ? std::string(*default_value) : require(key).as_string();
}

bool JsonReader::boolean(std::string_view key, std::optional<bool> default_value) const {
  return default_value && !has(key) ? *default_value : require(key).as_boolean();
}

int64_t JsonReader::integer(std::string_view key, std::optional<int64_t> default_value, int64_t min_value,
                            int64_t max_value) const {
  return default_value && !has(key) ? *default_value : require(key).as_integer(min_value, max_value);
}

double JsonReader::number(std::string_view key, std::optional<double> default_value, double min_value,
                          double max_value) const {
  return default_value && !has(key) ? *default_value : require(key).as_number(min_value, max_value);
}

std::vector<int64_t> JsonReader::integers(std::string_view key, int64_t min_value, int64_t max_value) const {
  const auto found = find(key);
  if (!found) return {};
  if (!found->is_array()) return {found->as_integer(min_value, max_value)};
  std::vector<int64_t> result;
  for (const auto& item : found->items()) result.push_back(item.as_integer(min_value, max_value));
  return result;
}

}  // namespace tessera
