// Reads JSON lines and JSON arrays as rows.
#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"
#include "tessera/data/records/row_source.h"
#include "tessera/data/records/text_file_reader.h"

namespace tessera::data {
namespace {

bool is_json_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

void check_object(const Json& value, const std::string& where) {
  TESSERA_CHECK(value.is_object(), ErrorKind::kFormat, "[data.read] {}: the record is {}, wanted a JSON object.", where,
                describe(value));
}

class JsonLines : public RowSource {
 public:
  explicit JsonLines(const std::filesystem::path& path) : stream_(path) {}

  bool next(RecordRow& row) override {
    for (std::string_view line; read_line(line);) {
      if (std::ranges::all_of(line, is_json_space)) continue;
      row.where = fmt::format("{} line {}", stream_.path().string(), number_);
      row.value = parse_json(line, "[data.read] " + row.where, kRecordLimits);
      check_object(row.value, row.where);
      return true;
    }
    return false;
  }

 private:
  // Returns the next line without its end. text_ holds the unread part of the file; `looked` is where the search for
  // the end of the line continues, so a long line is searched once.
  bool read_line(std::string_view& line) {
    for (size_t looked = at_;;) {
      const size_t end = text_.find('\n', looked);
      if (end != text_.npos) {
        line = std::string_view(text_).substr(at_, end - at_);
        at_ = end + 1;
        ++number_;
        return true;
      }
      text_.erase(0, at_);
      at_ = 0;
      looked = text_.size();
      TESSERA_CHECK(looked <= kRecordLimitBytes, ErrorKind::kFormat,
                    "[data.read] {} line {}: no end of the line within {} MiB, the limit of a record.",
                    stream_.path().string(), number_ + 1, kRecordLimitBytes >> 20);
      if (stream_.read_more(text_)) continue;
      if (text_.empty()) return false;
      last_ = std::move(text_);
      text_.clear();
      line = last_;
      ++number_;
      return true;
    }
  }

  TextFileReader stream_;
  std::string text_, last_;
  size_t at_ = 0;      // begin of the next line, in text_
  size_t number_ = 0;  // number of the line read last, from 1
};

// A position in the text, from 1. A column is one UTF-8 character.
struct TextPlace {
  size_t line = 1, column = 1;
  void pass(char c) {
    if (c == '\n') {
      ++line;
      column = 1;
    } else if ((static_cast<unsigned char>(c) & 0xc0) != 0x80) {
      ++column;
    }
  }
};

// Reads the records of one array without holding the array: finds the end of a record by its brackets and strings, then
// parses the record alone.
class JsonArray : public RowSource {
 public:
  explicit JsonArray(const std::filesystem::path& path) : stream_(path) {}

  bool next(RecordRow& row) override {
    if (done_) return false;
    char c = skip_space();
    if (first_) {
      if (c != '[') fail(found_text(c), "the beginning of an array");
      take();
      c = skip_space();
    }
    if (c == ']') {
      if (!first_) fail("a comma before the end of the array", "a record");
      take();
      finish();
      return false;
    }
    first_ = false;
    const TextPlace start = place_;
    read_record();
    row.where = describe_place(start);
    parse(start, row);
    c = skip_space();
    if (c == ',') {
      take();
    } else if (c == ']') {
      take();
      finish();
    } else {
      fail(found_text(c), "',' or ']' behind a record");
    }
    return true;
  }

 private:
  std::string describe_place(const TextPlace& place) const {
    return fmt::format("{} line {} column {}", stream_.path().string(), place.line, place.column);
  }
  [[noreturn]] void fail(const std::string& found, const char* expected) const {
    raise(ErrorKind::kFormat, "[data.read] {}: found {}, wanted {}.", describe_place(place_), found, expected);
  }
  static std::string found_text(char c) { return c == '\0' ? "the end of the file" : quote(std::string_view(&c, 1)); }

  // The next character, '\0' at the end of the file.
  char peek() {
    while (at_ == text_.size()) {
      text_.clear();
      at_ = 0;
      if (!stream_.read_more(text_)) return '\0';
    }
    return text_[at_];
  }
  char take() {
    const char c = peek();
    if (at_ < text_.size()) place_.pass(c), ++at_;
    return c;
  }
  char skip_space() {
    while (is_json_space(peek()) && at_ < text_.size()) take();
    return peek();
  }
  void finish() {
    done_ = true;
    const char c = skip_space();
    if (at_ < text_.size()) fail(found_text(c), "nothing behind the array");
  }

  // Reads up to the comma or bracket that ends the record. Only strings and nesting are followed; the JSON parser
  // checks the rest.
  void read_record() {
    const TextPlace start = place_;
    record_.clear();
    size_t depth = 0;
    for (bool in_string = false, escaped = false;;) {
      const char c = peek();
      if (at_ == text_.size()) {
        raise(ErrorKind::kFormat,
              "[data.read] {}: the file ends inside of the record that begins at line {} column {}. Fetch or write it "
              "again.",
              describe_place(place_), start.line, start.column);
      }
      if (in_string) {
        in_string = escaped || c != '"';
        escaped = !escaped && c == '\\';
      } else {
        if (depth == 0 && (c == ',' || c == ']' || c == '}')) return;
        if (c == '"') in_string = true;
        if (c == '{' || c == '[') ++depth;
        if (c == '}' || c == ']') --depth;
      }
      record_ += take();
      TESSERA_CHECK(record_.size() <= kRecordLimitBytes, ErrorKind::kFormat,
                    "[data.read] {}: a record of more than {} MiB, the limit of a record.", describe_place(start),
                    kRecordLimitBytes >> 20);
    }
  }

  void parse(const TextPlace& start, RecordRow& row) {
    try {
      row.value = parse_json(record_, "[data.read] " + row.where, kRecordLimits);
    } catch (const Error&) {
      // The parser counts bytes from the begin of the record; the message gives line and column in the file.
      const auto syntax_error = find_json_syntax_error(record_);
      if (!syntax_error) throw;
      TextPlace at = start;
      for (size_t i = 0; i + 1 < syntax_error->byte && i < record_.size(); ++i) at.pass(record_[i]);
      raise(ErrorKind::kFormat, "[data.read] {}: no valid JSON: {}", describe_place(at),
            escape(syntax_error->reason, 200));
    }
    check_object(row.value, row.where);
  }

  TextFileReader stream_;
  std::string text_, record_;
  size_t at_ = 0;
  TextPlace place_;
  bool first_ = true, done_ = false;
};

}  // namespace

std::unique_ptr<RowSource> open_json_lines(const std::filesystem::path& path) {
  return std::make_unique<JsonLines>(path);
}

std::unique_ptr<RowSource> open_json_array(const std::filesystem::path& path) {
  return std::make_unique<JsonArray>(path);
}

}  // namespace tessera::data
