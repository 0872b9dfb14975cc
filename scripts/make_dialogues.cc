// Turns the chatterbot-corpus YAML files into JSONL conversations ({"messages": [...]}) on stdout.
//
//   make_dialogues train|held-out FILE.yml...
//
// Exact repeats are dropped. Every tenth opening line is held out. A hash of the line decides, so that no opening line
// is in both parts.
#include <xxhash.h>
#include <yaml-cpp/yaml.h>

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

namespace {

std::string trimmed(std::string text) {
  const auto first = text.find_first_not_of(" \n\t");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \n\t") - first + 1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: make_dialogues train|held-out FILE.yml...\n");
    return 2;
  }
  const bool want_held_out = std::string(argv[1]) == "held-out";
  std::set<std::string> seen;
  for (int i = 2; i < argc; ++i) {
    const YAML::Node file = YAML::LoadFile(argv[i]);
    for (const auto& conversation : file["conversations"]) {
      if (!conversation.IsSequence()) continue;
      nlohmann::ordered_json messages = nlohmann::ordered_json::array();
      for (const auto& line : conversation) {
        const std::string content = line.IsScalar() ? trimmed(line.as<std::string>()) : "";
        if (content.empty()) break;
        messages.push_back({{"role", messages.size() % 2 == 0 ? "user" : "assistant"}, {"content", content}});
      }
      if (messages.size() % 2 == 1) messages.erase(messages.size() - 1);
      if (messages.empty()) continue;
      const std::string opening = messages[0]["content"];
      const bool held_out = XXH3_64bits(opening.data(), opening.size()) % 10 == 0;
      const std::string text = nlohmann::ordered_json{{"messages", messages}}.dump();
      if (held_out == want_held_out && seen.insert(text).second) std::cout << text << '\n';
    }
  }
  return seen.empty() ? 1 : 0;
}
