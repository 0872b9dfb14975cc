#include "tessera/data/sources.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/json.h"
#include "tessera/base/mapped_file.h"
#include "tessera/base/quote.h"
#include "tessera/data/encoding.h"

namespace tessera::data {
namespace {

// A record may be as long as its file's limit, but is no tree.
constexpr JsonLimits kLimits{.max_bytes = size_t{1} << 32, .max_depth = 100, .max_keys = 10'000'000};

std::string text_field(const Json& json, const char* key, const std::string& where) {
  const Json& value = json.at(key);
  TESSERA_CHECK(value.is_string(), ErrorKind::kFormat, "[data.read] {}: '{}' is {}, wanted a string.", where, key,
                value.type_name());
  return value.get<std::string>();
}

void check_messages(const Json& json, const std::string& where) {
  const Json& messages = json.at("messages");
  TESSERA_CHECK(messages.is_array() && !messages.empty(), ErrorKind::kFormat,
                "[data.read] {}: 'messages' is {}, wanted an array of at least one message.", where,
                messages.is_array() ? "empty" : messages.type_name());
  for (const auto& message : messages) {
    TESSERA_CHECK(message.is_object() && message.contains("role") && message["role"].is_string(), ErrorKind::kFormat,
                  "[data.read] {}: a message is no object with the string 'role'.", where);
  }
}

Record record_of(const Json& json, bool only_chat, std::string where) {
  TESSERA_CHECK(json.is_object(), ErrorKind::kFormat, "[data.read] {}: the line is {}, wanted a JSON object.", where,
                json.type_name());
  Record record{};
  if (json.contains("messages")) {
    check_messages(json, where);
    record.kind = RecordKind::kChat;
    record.json = &json;
  } else if (!only_chat && json.contains("prompt") && json.contains("completion")) {
    record.kind = RecordKind::kCompletion;
    record.text = text_field(json, "prompt", where);
    record.completion = text_field(json, "completion", where);
  } else if (!only_chat && json.contains("text")) {
    record.kind = RecordKind::kText;
    record.text = text_field(json, "text", where);
  } else {
    std::vector<std::string> keys;
    for (const auto& [key, value] : json.items()) {
      if (keys.size() < 8) keys.push_back(quote(key, 40));
    }
    raise(ErrorKind::kFormat, "[data.read] {}: found the keys {}, wanted {}.", where,
          keys.empty() ? "(none)" : fmt::format("{}", fmt::join(keys, ", ")),
          only_chat ? "'messages'" : "'messages', 'prompt' and 'completion', or 'text'");
  }
  record.where = std::move(where);
  return record;
}

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r\n") == std::string_view::npos; }

bool looks_like_jsonl(const std::filesystem::path& path, std::string_view content) {
  const std::string extension = path.extension().string();
  if (extension == ".jsonl" || extension == ".json") return true;
  if (extension == ".txt") return false;
  const size_t first = content.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && content[first] == '{';
}

}  // namespace

void read_records(const std::filesystem::path& path, const std::string& format,
                  const std::function<void(const Record&)>& visit) {
  const auto file = MappedFile::open(path);
  std::string_view content(reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size());
  check_encoding(content, path);
  if (content.starts_with("\xef\xbb\xbf")) content.remove_prefix(3);
  if (format == "text" || (format == "auto" && !looks_like_jsonl(path, content))) {
    if (is_blank(content)) return;
    return visit({.kind = RecordKind::kStream,
                  .text = std::string(content),
                  .completion = {},
                  .json = nullptr,
                  .where = path.string()});
  }
  size_t number = 0;
  for (size_t at = 0; at < content.size();) {
    const size_t end = std::min(content.find('\n', at), content.size());
    const std::string_view line = content.substr(at, end - at);
    at = end + 1;
    ++number;
    if (is_blank(line)) continue;
    std::string where = fmt::format("{} line {}", path.string(), number);
    const Json json = parse_json(line, "[data.read] " + where, kLimits);
    visit(record_of(json, format == "chat", std::move(where)));
  }
}

}  // namespace tessera::data
