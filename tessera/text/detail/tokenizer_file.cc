#include "tessera/text/detail/tokenizer_file.h"

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/text/detail/unicode.h"

namespace tessera::text {
namespace {

using Json = nlohmann::json;
constexpr size_t kMaxDepth = 64;
constexpr size_t kMaxQuoted = 60;

std::string describe(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null: return "null";
    case Json::value_t::object: return "an object";
    case Json::value_t::array: return "an array";
    case Json::value_t::boolean: return value.get<bool>() ? "true" : "false";
    case Json::value_t::string: {
      const auto& text = value.get_ref<const std::string&>();
      return text.size() <= kMaxQuoted ? "\"" + text + "\"" : "a string of " + std::to_string(text.size()) + " bytes";
    }
    default: return "the number " + value.dump();
  }
}

// Builds the DOM, but collects model.vocab and model.merges on the way: they are millions of values.
class Reader {
 public:
  using number_integer_t = Json::number_integer_t;
  using number_unsigned_t = Json::number_unsigned_t;
  using number_float_t = Json::number_float_t;
  using string_t = Json::string_t;
  using binary_t = Json::binary_t;

  explicit Reader(TokenizerFile& file) : file_(file) {}

  bool null() { return scalar(nullptr); }
  bool boolean(bool value) { return scalar(value); }
  bool number_integer(number_integer_t value) { return scalar(value); }
  bool number_float(number_float_t value, const string_t&) { return scalar(value); }
  bool binary(binary_t&) { return false; }
  bool number_unsigned(number_unsigned_t value) {
    if (mode_ == Mode::kVocab) {
      file_.vocab.emplace_back(std::move(key_), value);
      return true;
    }
    return scalar(value);
  }
  bool string(string_t& value) {
    if (mode_ == Mode::kMerges) return merge_string(value);
    if (mode_ == Mode::kMergePair) {
      if (pair_.size() == 2) fail_merge("more than two strings");
      pair_.push_back(std::move(value));
      return true;
    }
    return scalar(std::move(value));
  }
  bool key(string_t& value) {
    key_ = std::move(value);
    return true;
  }
  bool start_object(size_t) {
    if (mode_ == Mode::kNone && in_model() && key_ == "vocab") {
      file_.has_vocab = true;
      file_.vocab.clear();
      return enter(Mode::kVocab);
    }
    return open(Json::object());
  }
  bool end_object() {
    if (mode_ == Mode::kVocab) return leave();
    return close();
  }
  bool start_array(size_t) {
    if (mode_ == Mode::kMerges) {
      pair_.clear();
      mode_ = Mode::kMergePair;
      return deeper();
    }
    if (mode_ == Mode::kNone && in_model() && key_ == "merges") {
      file_.merges.clear();
      return enter(Mode::kMerges);
    }
    if (mode_ == Mode::kNone && in_model() && key_ == "vocab") return enter(Mode::kSkip);  // Unigram; the type is checked later
    return open(Json::array());
  }
  bool end_array() {
    if (mode_ == Mode::kMergePair) {
      if (pair_.size() != 2) fail_merge("an array that is no pair");
      file_.merges.emplace_back(std::move(pair_[0]), std::move(pair_[1]));
      mode_ = Mode::kMerges;
      --depth_;
      return true;
    }
    if (mode_ == Mode::kMerges) return leave();
    return close();
  }
  bool parse_error(size_t at, const std::string&, const Json::exception& error) {
    std::string reason = error.what();
    if (const auto cut = reason.find("syntax error"); cut != std::string::npos) reason = reason.substr(cut);
    if (reason.size() > 200) reason.resize(valid_utf8_prefix(std::string_view(reason).substr(0, 200)));
    raise(ErrorKind::kFormat, "[text.load] {}: byte {}: no valid JSON: {}", file_.name, at, reason);
  }

 private:
  enum class Mode { kNone, kVocab, kMerges, kMergePair, kSkip };

  // The innermost open container is the object root.model.
  bool in_model() const {
    return stack_.size() == 2 && stack_[0]->is_object() && stack_[1]->is_object() && model_open_;
  }
  bool deeper() {
    TESSERA_CHECK(++depth_ <= kMaxDepth, ErrorKind::kFormat, "[text.load] {}: JSON nested deeper than {} levels", file_.name, kMaxDepth);
    return true;
  }
  bool enter(Mode mode) {
    mode_ = mode;
    mode_depth_ = depth_;
    return deeper();
  }
  bool leave() {
    --depth_;
    if (depth_ == mode_depth_) mode_ = Mode::kNone;
    return true;
  }
  bool scalar(Json value) {
    switch (mode_) {
      case Mode::kSkip: return true;
      case Mode::kVocab:
        raise(ErrorKind::kFormat, "[text.load] {}: model.vocab: token \"{}\" has id {}, wanted an unsigned integer", file_.name,
              key_.substr(0, kMaxQuoted), describe(value));
      case Mode::kMerges: case Mode::kMergePair: fail_merge(describe(value));
      case Mode::kNone: place(std::move(value));
    }
    return true;
  }
  bool open(Json value) {
    deeper();
    if (mode_ == Mode::kSkip) return true;
    if (mode_ != Mode::kNone) {
      --depth_;
      return scalar(std::move(value));
    }
    const bool model = stack_.size() == 1 && stack_[0]->is_object() && key_ == "model";
    stack_.push_back(place(std::move(value)));
    if (model) model_open_ = true;
    return true;
  }
  bool close() {
    if (mode_ == Mode::kSkip) return leave();
    --depth_;
    if (stack_.size() == 2) model_open_ = false;
    stack_.pop_back();
    return true;
  }
  Json* place(Json value) {
    if (stack_.empty()) {
      *file_.json = std::move(value);
      return file_.json.get();
    }
    Json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    Json& slot = parent[key_];
    slot = std::move(value);
    return &slot;
  }
  bool merge_string(const std::string& value) {
    if (value.starts_with("#version")) return true;
    const size_t space = value.find(' ');
    if (space == std::string::npos || value.find(' ', space + 1) != std::string::npos) {
      fail_merge("\"" + value.substr(0, kMaxQuoted) + "\"");
    }
    file_.merges.emplace_back(value.substr(0, space), value.substr(space + 1));
    return true;
  }
  [[noreturn]] void fail_merge(std::string_view found) const {
    raise(ErrorKind::kFormat, "[text.load] {}: model.merges[{}]: found {}, wanted \"a b\" or [\"a\", \"b\"]", file_.name,
          file_.merges.size(), found);
  }

  TokenizerFile& file_;
  std::vector<Json*> stack_;
  std::string key_;
  std::vector<std::string> pair_;
  Mode mode_ = Mode::kNone;
  size_t mode_depth_ = 0;
  size_t depth_ = 0;
  bool model_open_ = false;
};

}  // namespace

bool JsonNode::is_null() const { return value_->is_null(); }
bool JsonNode::is_object() const { return value_->is_object(); }

void JsonNode::fail(std::string_view found, std::string_view wanted) const {
  raise(ErrorKind::kFormat, "[text.load] {}: found {}, wanted {}", path_, found, wanted);
}

bool JsonNode::has(const char* key) const {
  if (!value_->is_object()) fail(describe(*value_), "an object");
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

JsonNode JsonNode::at(const char* key) const {
  if (!value_->is_object()) fail(describe(*value_), "an object");
  const auto found = value_->find(key);
  if (found == value_->end()) fail("no member '" + std::string(key) + "'", "one");
  return {*found, path_ + (path_.ends_with(": ") ? "" : ".") + key};
}

std::vector<JsonNode> JsonNode::items() const {
  if (!value_->is_array()) fail(describe(*value_), "an array");
  std::vector<JsonNode> result;
  result.reserve(value_->size());
  for (size_t i = 0; i < value_->size(); ++i) result.emplace_back((*value_)[i], path_ + "[" + std::to_string(i) + "]");
  return result;
}

std::vector<std::pair<std::string, JsonNode>> JsonNode::members() const {
  if (!value_->is_object()) fail(describe(*value_), "an object");
  std::vector<std::pair<std::string, JsonNode>> result;
  for (const auto& [key, value] : value_->items()) result.emplace_back(key, JsonNode(value, path_ + "." + key));
  return result;
}

std::string JsonNode::as_string() const {
  if (!value_->is_string()) fail(describe(*value_), "a string");
  return value_->get<std::string>();
}

uint64_t JsonNode::as_unsigned() const {
  if (!value_->is_number_unsigned()) fail(describe(*value_), "an unsigned integer");
  return value_->get<uint64_t>();
}

std::string JsonNode::string(const char* key) const { return at(key).as_string(); }

std::string JsonNode::string(const char* key, std::string_view missing) const {
  return has(key) ? at(key).as_string() : std::string(missing);
}

bool JsonNode::boolean(const char* key) const {
  const JsonNode node = at(key);
  if (!node.value_->is_boolean()) node.fail(describe(*node.value_), "true or false");
  return node.value_->get<bool>();
}

bool JsonNode::boolean(const char* key, bool missing) const { return has(key) ? boolean(key) : missing; }

uint32_t JsonNode::character(const char* key) const {
  const JsonNode node = at(key);
  const std::string text = node.as_string();
  if (text.empty() || utf8_length(text[0]) != text.size()) node.fail(describe(*node.value_), "one character");
  return decode_utf8(text.data()).code;
}

TokenizerFile::TokenizerFile() : json(std::make_unique<Json>()) {}
TokenizerFile::~TokenizerFile() = default;
TokenizerFile::TokenizerFile(TokenizerFile&&) noexcept = default;

JsonNode TokenizerFile::root() const { return {*json, name + ": "}; }

TokenizerFile parse_tokenizer_file(std::string_view text, std::string name) {
  TokenizerFile file;
  file.name = std::move(name);
  Reader reader(file);
  Json::sax_parse(text.begin(), text.end(), &reader);
  if (!file.json->is_object()) file.root().fail(describe(*file.json), "an object");
  return file;
}

}  // namespace tessera::text
