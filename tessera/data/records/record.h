// Records of training data: what kind a row is of, and what is learnt of it.
//
//   RecordReader reader(source.format, source.columns);
//   Record record = reader.read(row);
//
// | kind | columns | |
// |---|---|---|
// | chat | messages | OpenAI's: role, content, tool_calls; `tools` beside them |
// | sharegpt | conversations | from, value; or role, content |
// | preference | chosen, rejected | and `prompt`; for preference training |
// | completion | prompt, completion | text, or lists of messages |
// | alpaca | instruction, output | and `input`, `system`, `history` |
// | text | text | |
//
// "auto" takes the first kind of this table whose columns the first record has; a null counts as absent. All records of
// a file are then of it. "jsonl" asks each record for itself. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tessera::data {

struct Row;

// kStream: a file of plain text or a part of it, cut into rows; kTokens: ids, cut into rows.
enum class RecordKind { kStream, kTokens, kText, kCompletion, kInstruction, kChat, kPreference };
const char* to_string(RecordKind kind);

struct Record {
  RecordKind kind;
  std::string text = {};             // of kStream and kText, the prompt of kCompletion, the instruction
  std::string input = {};            // of kInstruction
  std::string completion = {};       // of kCompletion and kInstruction
  bool first = true, last = true;    // of the parts of a stream
  std::vector<int32_t> tokens = {};  // of kTokens
  // kChat: {"messages": [{"role", "content", ...}], "tools": ...}, as chat templates take them: arguments of tool calls
  // are objects. kInstruction: the messages in front of the instruction, where there are any. kPreference: {"prompt",
  // "chosen", "rejected"}, each text or messages; "prompt" may be absent.
  std::shared_ptr<const nlohmann::ordered_json> json = {};
  std::vector<uint8_t> silent = {};  // of kChat: 1 for messages that are not learnt though the assistant speaks
  std::string where = {};            // "FILE line N", for messages
};

class RecordReader {
 public:
  // `columns`: our name -> the file's.
  RecordReader(std::string format, std::map<std::string, std::string> columns);

  // Error kFormat names the place and what was found: columns of no kind, or of another kind than the records before,
  // values of another type, roles that are not known.
  Record read(Row& row);
  // Of the records so far; nothing before the first.
  std::optional<RecordKind> kind() const { return kind_; }

 private:
  std::string format_;
  std::map<std::string, std::string> columns_;
  std::optional<RecordKind> kind_;
};

}  // namespace tessera::data
