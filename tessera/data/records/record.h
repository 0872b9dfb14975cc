// Records of training data: the kind of each row, and which of its text is trained on.
//
//   RecordReader reader(source.format, source.columns);
//   TrainingRecord record = reader.read(row);
//
// | kind | columns | |
// |---|---|---|
// | chat | messages | OpenAI's: role, content, tool_calls; also a column `tools` |
// | sharegpt | conversations | from, value; or role, content |
// | preference | chosen, rejected | and `prompt`; for preference training |
// | completion | prompt, completion | text, or lists of messages |
// | alpaca | instruction, output | and `input`, `system`, `history` |
// | text | text | |
//
// "auto" chooses the first kind of this table whose columns the first record has; a null counts as absent. All records
// of the file must then be of that kind. "jsonl" chooses for each record separately. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tessera::data {

struct RecordRow;

// kStream: a file of plain text or a part of one, to be cut into rows. kTokens: token ids, to be cut into rows.
enum class RecordKind { kStream, kTokens, kText, kCompletion, kInstruction, kChat, kPreference };
const char* to_string(RecordKind kind);

struct TrainingRecord {
  RecordKind kind;
  std::string text = {};        // kStream and kText: the text; kCompletion: the prompt; kInstruction: the instruction
  std::string input = {};       // kInstruction
  std::string completion = {};  // kCompletion and kInstruction
  bool first = true, last = true;    // kStream: whether this is the first or last part of the file
  std::vector<int32_t> tokens = {};  // kTokens
  // The JSON of the record. kChat: {"messages": [{"role", "content", ...}], "tools": ...} in the form of chat
  // templates: arguments of tool calls are objects. kInstruction: the messages that come before the instruction, null
  // if there are none. kPreference: {"prompt", "chosen", "rejected"}, each a text or messages; "prompt" may be absent.
  // Null for other kinds.
  std::shared_ptr<const nlohmann::ordered_json> json = {};
  std::vector<uint8_t> is_excluded = {};  // kChat: 1 for an assistant message that is excluded from training
  std::string where = {};                 // "FILE line N", for messages
};

class RecordReader {
 public:
  // `columns`: Tessera's column name -> the file's column name.
  RecordReader(std::string format, std::map<std::string, std::string> columns);

  // Reads one record; its columns decide its kind. Error kFormat when the columns fit no kind, when they fit another
  // kind than that of the earlier records (allowed if the format is "jsonl"), and for values of a wrong type and
  // unknown roles. The message names the place and the value found.
  TrainingRecord read(RecordRow& row);
  // The kind of the records so far; nullopt before the first record.
  std::optional<RecordKind> kind() const { return kind_; }

 private:
  std::string format_;
  std::map<std::string, std::string> columns_;
  std::optional<RecordKind> kind_;
};

}  // namespace tessera::data
