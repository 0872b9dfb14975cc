#include "tessera/data/records/record.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/enum_name.h"
#include "tessera/base/error.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"
#include "tessera/data/records/messages.h"
#include "tessera/data/records/row_source.h"

namespace tessera::data {
namespace {

struct RecordFormat {
  RecordKind kind;
  const char* format;                // the data.format that selects this kind
  std::vector<const char*> columns;  // columns that identify this kind
};

// The first kind whose columns a record has is chosen, so the order decides for a record with columns of several kinds.
const std::vector<RecordFormat>& record_formats() {
  static const std::vector<RecordFormat> kRows = {
      {RecordKind::kChat, "chat", {"messages"}},
      {RecordKind::kChat, "sharegpt", {"conversations"}},
      {RecordKind::kPreference, "preference", {"chosen", "rejected"}},
      {RecordKind::kCompletion, "completion", {"prompt", "completion"}},
      {RecordKind::kInstruction, "alpaca", {"instruction", "output"}},
      {RecordKind::kText, "text", {"text"}},
  };
  return kRows;
}

bool has(const Json& row, const char* column) {
  const auto found = row.find(column);
  return found != row.end() && !found->is_null();
}

bool has_columns(const Json& row, const RecordFormat& kind) {
  return std::ranges::all_of(kind.columns, [&](const char* column) { return has(row, column); });
}

// Returns the first kind of record, among the kinds that `format` allows, all of whose columns the row has. Returns
// null when there is none.
const RecordFormat* kind_of(const Json& row, const std::string& format) {
  for (const auto& kind : record_formats()) {
    // The formats "jsonl" and "auto" allow any kind of record. "chat" and "sharegpt" both allow a conversation in the
    // column `messages` or in the column `conversations`.
    const bool asked = format == "auto" || format == "jsonl" || format == kind.format ||
                       (kind.kind == RecordKind::kChat && (format == "chat" || format == "sharegpt"));
    if (asked && has_columns(row, kind)) return &kind;
  }
  return nullptr;
}

std::string wanted_columns(const std::string& format) {
  if (format == "auto" || format == "jsonl") {
    return "'messages', 'conversations', 'chosen' and 'rejected', 'prompt' and 'completion', 'instruction' and "
           "'output', or 'text'";
  }
  for (const auto& kind : record_formats()) {
    if (format != kind.format) continue;
    std::vector<std::string> names;
    for (const char* column : kind.columns) names.push_back(quote(column));
    return fmt::format("{}", fmt::join(names, " and "));
  }
  return "records";
}

std::string keys_of(const Json& row) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : row.items()) {
    if (keys.size() < 8) keys.push_back(quote(key, 40) + (value.is_null() ? " (null)" : ""));
  }
  return keys.empty() ? "(none)" : fmt::format("{}", fmt::join(keys, ", "));
}

std::string text_of(const Json& row, const char* key, const std::string& where) {
  const Json& value = row.at(key);
  TESSERA_CHECK(value.is_string(), ErrorKind::kFormat, "[data.read] {}: {} is {}, wanted a string.", where, quote(key),
                value.type_name());
  return value.get<std::string>();
}

// Removes members that are null, except a message's content. The recursion has no limit of its own, because the
// function is called only for rows of Parquet files, and the Parquet reader limits the depth of a row.
Json without_nulls(const Json& value) {
  if (value.is_array()) {
    Json list = Json::array();
    for (const auto& item : value) list.push_back(without_nulls(item));
    return list;
  }
  if (!value.is_object()) return value;
  Json object = Json::object();
  for (const auto& [key, item] : value.items()) {
    if (!item.is_null() || key == "content") object[key] = without_nulls(item);
  }
  return object;
}

bool is_optional(const std::string& column) {
  return column == "input" || column == "system" || column == "history" || column == "tools";
}

// Renames columns to Tessera's names. A column that already had such a name is dropped.
void rename(Json& row, const std::map<std::string, std::string>& columns, const std::string& where) {
  if (columns.empty()) return;
  Json renamed = Json::object();
  for (auto& [ours, theirs] : columns) {
    const auto found = row.find(theirs);
    if (found == row.end() && is_optional(ours)) continue;
    TESSERA_CHECK(found != row.end(), ErrorKind::kFormat,
                  "[data.read] {}: no column {}, which data.columns calls {}; found {}.", where, quote(theirs),
                  quote(ours), keys_of(row));
    renamed[ours] = *found;
  }
  std::vector<std::string> taken;
  for (const auto& [ours, theirs] : columns) taken.push_back(theirs);
  for (auto& [key, value] : row.items()) {
    const bool moved = std::ranges::find(taken, key) != taken.end();
    if (!renamed.contains(key) && !moved) renamed[key] = std::move(value);
  }
  row = std::move(renamed);
}

void set_chat(const Json& row, Json messages, TrainingRecord& record) {
  record.is_excluded = excluded_messages(messages);
  Json chat = Json::object();
  chat["messages"] = std::move(messages);
  add_tools(row, chat, record.where);
  record.json = std::make_shared<const Json>(std::move(chat));
}

// The message of the column `system`; nullopt when the column is absent or empty.
std::optional<Json> system_message(const Json& row, const std::string& where) {
  if (!has(row, "system")) return std::nullopt;
  auto text = text_of(row, "system", where);
  if (text.empty()) return std::nullopt;
  return Json{{"role", "system"}, {"content", std::move(text)}};
}

void read_completion(const Json& row, TrainingRecord& record) {
  const Json &prompt = row.at("prompt"), &completion = row.at("completion");
  if (!prompt.is_array() && !completion.is_array()) {
    record.text = text_of(row, "prompt", record.where);
    record.completion = text_of(row, "completion", record.where);
    return;
  }
  // A prompt and a completion that are lists of messages form one conversation, in which only the messages of the
  // completion are trained on.
  record.kind = RecordKind::kChat;
  Json messages = openai_messages(prompt, "prompt", record.where);
  const size_t first = messages.size();
  for (auto& message : openai_messages(completion, "completion", record.where)) messages.push_back(message);
  set_chat(row, std::move(messages), record);
  std::fill_n(record.is_excluded.begin(), first, uint8_t{1});
}

void read_chat(const Json& row, const char* column, TrainingRecord& record) {
  Json messages = openai_messages(row.at(column), column, record.where);
  if (messages[0]["role"] != "system") {
    if (auto system = system_message(row, record.where)) messages.insert(messages.begin(), std::move(*system));
  }
  set_chat(row, std::move(messages), record);
}

// The messages before the instruction, from LLaMA-Factory's columns `system` and `history`.
Json messages_before(const Json& row, const std::string& where) {
  Json messages = Json::array();
  if (auto system = system_message(row, where)) messages.push_back(std::move(*system));
  if (!has(row, "history")) return messages;
  const Json& history = row.at("history");
  TESSERA_CHECK(history.is_array(), ErrorKind::kFormat,
                "[data.read] {}: 'history' is {}, wanted a list of pairs [user, assistant].", where, describe(history));
  for (size_t i = 0; i < history.size(); ++i) {
    const Json& pair = history[i];
    const bool is_pair = pair.is_array() && pair.size() == 2 && pair[0].is_string() && pair[1].is_string();
    TESSERA_CHECK(is_pair, ErrorKind::kFormat,
                  "[data.read] {}: pair {} of 'history' is {}, wanted [user, assistant], two strings.", where, i,
                  describe(pair));
    messages.push_back({{"role", "user"}, {"content", pair[0]}});
    messages.push_back({{"role", "assistant"}, {"content", pair[1]}});
  }
  return messages;
}

void read_instruction(const Json& row, TrainingRecord& record) {
  record.text = text_of(row, "instruction", record.where);
  if (has(row, "input")) record.input = text_of(row, "input", record.where);
  record.completion = text_of(row, "output", record.where);
  auto before = messages_before(row, record.where);
  if (!before.empty()) record.json = std::make_shared<const Json>(std::move(before));
}

void read_preference(const Json& row, TrainingRecord& record) {
  Json pair = Json::object();
  for (const char* key : {"prompt", "chosen", "rejected"}) {
    if (!has(row, key)) continue;
    pair[key] = row.at(key).is_string() ? row.at(key) : openai_messages(row.at(key), key, record.where);
  }
  TESSERA_CHECK(pair["chosen"].is_string() == pair["rejected"].is_string(), ErrorKind::kFormat,
                "[data.read] {}: of 'chosen' and 'rejected' one is text, the other a list of messages.", record.where);
  record.json = std::make_shared<const Json>(std::move(pair));
}

}  // namespace

const char* to_string(RecordKind kind) {
  return enum_name(kind,
                   {"a stream of text", "token ids", "texts", "prompts and completions", "instructions (Alpaca)",
                    "chats", "preference pairs"},
                   "");
}

RecordReader::RecordReader(std::string format, std::map<std::string, std::string> columns)
    : format_(std::move(format)), columns_(std::move(columns)) {}

TrainingRecord RecordReader::read(RecordRow& row) {
  if (row.nulls_are_absent) row.value = without_nulls(row.value);
  rename(row.value, columns_, row.where);
  const RecordFormat* kind = kind_of(row.value, format_);
  TESSERA_CHECK(kind != nullptr, ErrorKind::kFormat,
                "[data.read] {}: found the keys {}, wanted {}. data.columns gives columns other names.", row.where,
                keys_of(row.value), wanted_columns(format_));
  TESSERA_CHECK(!kind_ || *kind_ == kind->kind || format_ == "jsonl", ErrorKind::kFormat,
                "[data.read] {}: found the keys {}, which are {}; the records before are {}. A file has one kind of "
                "records unless data.format is jsonl.",
                row.where, keys_of(row.value), to_string(kind->kind), to_string(*kind_));
  if (!kind_) kind_ = kind->kind;
  TrainingRecord record{.kind = kind->kind, .where = row.where};
  switch (kind->kind) {
    case RecordKind::kChat:
      read_chat(row.value, kind->columns.front(), record);
      break;
    case RecordKind::kPreference:
      read_preference(row.value, record);
      break;
    case RecordKind::kCompletion:
      read_completion(row.value, record);
      break;
    case RecordKind::kInstruction:
      read_instruction(row.value, record);
      break;
    default:
      record.text = text_of(row.value, "text", record.where);
  }
  return record;
}

}  // namespace tessera::data
