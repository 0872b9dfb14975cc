// The records of training files.
//
//   read_records("dialogues.jsonl", "auto", [&](const Record& record) { ... });
//
// format "text": the file is one stream of text. "jsonl": a JSON object a line, with "text", with "prompt" and
// "completion", or with "messages" (and "tools"). "chat": jsonl whose records all have "messages". "auto": by the name,
// .jsonl and .json are jsonl, .txt is text; any other file is jsonl when its first character is '{', else text.
// Blank lines of jsonl are skipped. Anything else that does not fit is an Error that names file, line and byte.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tessera::data {

enum class RecordKind { kStream, kText, kCompletion, kChat };

struct Record {
  RecordKind kind;
  std::string text;                              // of kStream and kText, the prompt of kCompletion
  std::string completion;                        // of kCompletion
  const nlohmann::ordered_json* json = nullptr;  // of kChat: the whole record
  std::string where;                             // "FILE line N", for messages
};

void read_records(const std::filesystem::path& path, const std::string& format,
                  const std::function<void(const Record&)>& visit);

}  // namespace tessera::data
