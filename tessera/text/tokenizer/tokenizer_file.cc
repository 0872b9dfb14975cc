#include "tessera/text/tokenizer/tokenizer_file.h"

#include <nlohmann/json.hpp>

#include "tessera/base/text/quote.h"

namespace tessera::text {
namespace {

constexpr JsonLimits kLimits{.max_bytes = size_t{1} << 30, .max_depth = 64, .max_keys = 16'000'000};
constexpr size_t kShownBytes = 60;

// The SAX handler. It passes all events to a JsonBuilder, except those inside model.vocab and model.merges. The handler
// stores their values in TokenizerFile::vocab and TokenizerFile::merges, because there are millions of them, which
// would be slow as a JSON tree. mode_ says whether the parser is inside model.vocab, inside model.merges, or outside
// both. The builder counts keys and depth everywhere, so the limits hold for the whole file.
class TokenizerJsonHandler {
 public:
  explicit TokenizerJsonHandler(TokenizerFile& file)
      : file_(file), builder_(*file.json, "[text.load] " + file.name, kLimits) {}

  bool null() { return scalar(nullptr); }
  bool boolean(bool value) { return scalar(value); }
  bool number_integer(int64_t value) { return scalar(value); }
  bool number_float(double value, const std::string&) { return scalar(value); }
  bool binary(Json::binary_t&) { return false; }
  bool number_unsigned(uint64_t value) {
    if (mode_ != Mode::kVocab) return scalar(value);
    file_.vocab.emplace_back(std::move(key_), value);
    return true;
  }
  bool string(std::string& value) {
    if (mode_ == Mode::kMerges) return merge_string(value);
    if (mode_ != Mode::kMergePair) return scalar(std::move(value));
    if (pair_.size() == 2) fail_merge("more than two strings");
    pair_.push_back(std::move(value));
    return true;
  }
  bool key(std::string& value) {
    key_ = value;
    if (mode_ == Mode::kNone) {
      builder_.key(value);
    } else {
      builder_.count_key();
    }
    return true;
  }
  bool start_object(size_t) {
    if (at_member("vocab")) {
      file_.has_vocab = true;
      file_.vocab.clear();
      return enter(Mode::kVocab);
    }
    return open(true);
  }
  bool end_object() { return mode_ == Mode::kVocab ? leave() : close(); }
  bool start_array(size_t) {
    if (mode_ == Mode::kMerges) {
      pair_.clear();
      mode_ = Mode::kMergePair;
      builder_.enter();
      return true;
    }
    if (at_member("merges")) {
      file_.merges.clear();
      return enter(Mode::kMerges);
    }
    // In a Unigram model "vocab" is an array. The array is skipped; checked_bpe() rejects the type of the model later.
    if (at_member("vocab")) return enter(Mode::kSkip);
    return open(false);
  }
  bool end_array() {
    if (mode_ == Mode::kMergePair) {
      if (pair_.size() != 2) fail_merge("an array that is no pair");
      file_.merges.emplace_back(std::move(pair_[0]), std::move(pair_[1]));
      mode_ = Mode::kMerges;
      builder_.leave();
      return true;
    }
    return mode_ == Mode::kMerges ? leave() : close();
  }
  bool parse_error(size_t byte, const std::string&, const nlohmann::detail::exception& error) {
    builder_.syntax_error(byte, error.what());
  }

 private:
  enum class Mode { kNone, kVocab, kMerges, kMergePair, kSkip };

  // Whether the next value is that of the key `name` in the object "model" of the root.
  bool at_member(std::string_view name) const {
    return mode_ == Mode::kNone && model_open_ && depth_ == 2 && key_ == name;
  }
  bool enter(Mode mode) {
    mode_ = mode;
    skipped_ = 0;
    builder_.enter();
    return true;
  }
  bool leave() {
    builder_.leave();
    mode_ = Mode::kNone;
    return true;
  }
  bool scalar(Json value) {
    switch (mode_) {
      case Mode::kSkip:
        return true;
      case Mode::kVocab:
        raise(ErrorKind::kFormat, "[text.load] {}: model.vocab: token {} has id {}, wanted an unsigned integer",
              file_.name, quote(key_, kShownBytes), describe(value));
      case Mode::kMerges:
      case Mode::kMergePair:
        fail_merge(describe(value));
      case Mode::kNone:
        builder_.value(std::move(value));
    }
    return true;
  }
  bool open(bool object) {
    if (mode_ == Mode::kSkip) {
      builder_.enter();
      ++skipped_;
      return true;
    }
    if (mode_ != Mode::kNone) return scalar(object ? Json::object() : Json::array());
    const bool model = depth_ == 1 && key_ == "model" && object;
    builder_.open(object ? Json::object() : Json::array());
    if (++depth_ == 1) root_is_object_ = object;
    if (model && root_is_object_) model_open_ = true;
    return true;
  }
  bool close() {
    if (mode_ == Mode::kSkip) {
      if (skipped_ == 0) return leave();
      --skipped_;
      builder_.leave();
      return true;
    }
    builder_.close();
    if (--depth_ == 1) model_open_ = false;
    return true;
  }
  // A merge as a string, "a b". The comment line "#version ..." of merges.txt is skipped.
  bool merge_string(const std::string& value) {
    if (value.starts_with("#version")) return true;
    const size_t space = value.find(' ');
    if (space == std::string::npos || value.find(' ', space + 1) != std::string::npos) {
      fail_merge(quote(value, kShownBytes));
    }
    file_.merges.emplace_back(value.substr(0, space), value.substr(space + 1));
    return true;
  }
  [[noreturn]] void fail_merge(std::string_view found) const {
    raise(ErrorKind::kFormat, "[text.load] {}: model.merges[{}]: found {}, wanted \"a b\" or [\"a\", \"b\"]",
          file_.name, file_.merges.size(), found);
  }

  TokenizerFile& file_;
  JsonBuilder builder_;
  std::string key_;
  std::vector<std::string> pair_;
  Mode mode_ = Mode::kNone;
  size_t depth_ = 0;    // number of open containers in the builder
  size_t skipped_ = 0;  // number of open containers inside the skipped one
  bool root_is_object_ = false;
  bool model_open_ = false;
};

}  // namespace

uint32_t character_of(const JsonReader& object, std::string_view key) {
  const JsonReader node = object.at(key);
  const std::string text = node.as_string();
  if (text.empty() || utf8_length(text[0]) != text.size()) node.fail("one character");
  return decode_utf8(text.data()).code;
}

JsonReader TokenizerFile::root() const { return {*json, "[text.load] " + name}; }

TokenizerFile parse_tokenizer_file(std::string_view text, std::string name) {
  TokenizerFile file;
  file.name = std::move(name);
  file.json = std::make_shared<Json>();
  TokenizerJsonHandler events(file);
  Json::sax_parse(text.begin(), text.end(), &events);
  if (!file.json->is_object()) file.root().fail("an object");
  return file;
}

}  // namespace tessera::text
