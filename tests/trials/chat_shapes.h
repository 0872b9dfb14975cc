// Random chats (oracle/chat_shapes.py) are rendered by chat templates and made into training samples.
//
//   ShapeChecks checks(folder);
//   checks.run(name, source, cases);
//   EXPECT_TRUE(checks.faults().empty()) << checks.faults()[0];
//
// Rendered texts and errors are compared with those of transformers. Loss masks are checked: texts of the assistant
// count in the loss, and all other texts do not. A turn begins where the prompt for it ends, and ends within the text
// of the conversation up to this turn, if these texts are prefixes of the whole text. {% generation %} blocks count
// exactly as they are.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/json.h"
#include "tessera/data/records/messages.h"
#include "tessera/data/records/samples.h"
#include "tessera/text/chat/chat_messages.h"
#include "tessera/text/chat/chat_template.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::trials {

// A byte tokenizer. All control tokens that the template spells are special tokens.
inline text::Tokenizer tokenizer_for(const std::string& source, const std::filesystem::path& folder) {
  data::make_byte_tokenizer(folder);
  auto file = nlohmann::json::parse(read_file(folder / "tokenizer.json"));
  static const std::regex kTokens(
      R"(<[^<>\s"'{}]*(?:\||｜)[^<>\s"'{}]*>|</?s>|<[a-z]+_of_[a-z]+>|\[/?[A-Z_]{3,24}\]|</?\[?(?:BOS|EOS|SPECIAL_\d+)\]?>)");
  std::set<std::string> tokens = {"<s>", "</s>"};
  for (std::sregex_iterator found(source.begin(), source.end(), kTokens), end; found != end; ++found) {
    tokens.insert(found->str());
  }
  int id = data::kEos + 1;
  file["added_tokens"] = nlohmann::json::array();
  for (const auto& token : tokens) {
    file["added_tokens"].push_back({{"id", id++},
                                    {"content", token},
                                    {"special", true},
                                    {"single_word", false},
                                    {"lstrip", false},
                                    {"rstrip", false},
                                    {"normalized", false}});
  }
  std::ofstream(folder / "tokenizer.json") << file;
  std::ofstream(folder / "tokenizer_config.json") << R"({"bos_token": "<s>", "eos_token": "</s>"})";
  std::ofstream(folder / "chat_template.jinja", std::ios::binary) << source;
  return text::Tokenizer::from_folder(folder);
}

class ShapeChecks {
 public:
  explicit ShapeChecks(const testing::TempFolder& folder) : folder_(folder.path()) {}

  void run(const std::string& name, const std::string& source, const Json& cases) {
    const auto tokenizer = tokenizer_for(source, folder_);
    const auto chat = text::ChatTemplate::from_folder(folder_);
    for (size_t i = 0; i < cases.size(); ++i) {
      where_ = name + " case " + std::to_string(i);
      shape_ = &cases[i];
      ++this->cases;
      bool rendered = false;
      for (const bool prompt : {false, true}) rendered = compare_text(*chat, prompt);
      if (cases[i].at("0").contains("text") || !rendered) compare_mask(chat, tokenizer);
    }
  }

  int cases = 0, errors = 0, refused = 0, samples = 0, turns = 0, exact_turns = 0;
  const std::vector<std::string>& faults() const { return faults_; }

 private:
  void fault(const std::string& text) {
    if (faults_.size() < 2000) faults_.push_back(where_ + ": " + text + "\n  " + shape_->at("messages").dump());
  }

  bool compare_text(const text::ChatTemplate& chat, bool prompt) {
    const Json& theirs = shape_->at(prompt ? "1" : "0");
    Json extra = shape_->at("extra");
    if (shape_->contains("tools")) extra["tools"] = shape_->at("tools");
    try {
      const auto ours = chat.render(shape_->at("messages"), prompt, extra);
      if (theirs.contains("error")) {
        fault("is rendered, transformers raises " + theirs["error"].get<std::string>());
      } else if (ours.text != theirs["text"].get_ref<const std::string&>() ||
                 Json(ours.generation_spans) != theirs["spans"]) {
        fault("differs: ours " + ours.text + "\n  theirs " + theirs["text"].get<std::string>());
      }
      return true;
    } catch (const Error& error) {
      ++errors;
      if (!theirs.contains("error")) fault(error.what());
      return false;
    }
  }

  void compare_mask(const std::optional<text::ChatTemplate>& chat, const text::Tokenizer& tokenizer) {
    Json record = {{"messages", data::openai_messages(shape_->at("messages"), "messages", "case")}};
    Json extra = Json::object();
    if (shape_->contains("tools")) record["tools"] = extra["tools"] = shape_->at("tools");
    const Json messages = text::adapt_messages(*chat, record["messages"]);
    text::RenderedChat rendered;
    try {
      rendered = chat->render(messages, false, extra);
    } catch (const Error&) {
      ++refused;
      return;
    }
    const data::SampleMaker maker(tokenizer, chat);
    data::TokenizedSample sample;
    try {
      sample =
          maker.make({.kind = data::RecordKind::kChat, .json = std::make_shared<const Json>(record), .where = where_});
    } catch (const Error& error) {
      // If the first message is the assistant's, no earlier text exists at which a prompt could end.
      if (messages[messages[0]["role"] == "system" ? 1 : 0]["role"] == "assistant") {
        ++refused;
        return;
      }
      return fault(std::string(error.what()) + "\n  " + rendered.text);
    }
    ++samples;
    const auto encoding = tokenizer.encode_with_offsets(rendered.text, {.add_special_tokens = false});
    std::vector<uint8_t> learnt(rendered.text.size(), 0);  // one value per byte
    for (size_t i = 0; i < encoding.ids.size(); ++i) {
      for (size_t at = encoding.offsets[i].first; at < encoding.offsets[i].second; ++at) {
        learnt[at] = sample.loss_mask[i];
      }
    }
    if (chat->marks_generation()) return compare_spans(rendered, learnt);
    compare_words(messages, rendered.text, learnt);
    const bool same = messages == shape_->at("messages") && !shape_->at("extra").contains("enable_thinking");
    if (same && shape_->contains("turns")) compare_turns(tokenizer, rendered.text, learnt);
  }

  void compare_spans(const text::RenderedChat& rendered, const std::vector<uint8_t>& learnt) {
    std::vector<uint8_t> marked(learnt.size(), 0);
    for (const auto& [first, last] : rendered.generation_spans) {
      std::fill(marked.begin() + static_cast<ptrdiff_t>(first), marked.begin() + static_cast<ptrdiff_t>(last), 1);
    }
    if (marked != learnt) fault("other bytes than the generation blocks are learnt: " + shown(rendered.text, learnt));
  }

  static std::string shown(const std::string& text, const std::vector<uint8_t>& learnt) {
    std::string out;
    for (size_t at = 0; at < text.size(); ++at) {
      if (learnt[at] && (at == 0 || !learnt[at - 1])) out += "{{{";
      if (!learnt[at] && at > 0 && learnt[at - 1]) out += "}}}";
      out += text[at];
    }
    return out;
  }

  // The words of each message are unique: "w3n17e".
  void compare_words(const Json& messages, const std::string& text, const std::vector<uint8_t>& learnt) {
    static const std::regex kWord(R"(w(\d+)n\d+e)");
    for (std::sregex_iterator found(text.begin(), text.end(), kWord), end; found != end; ++found) {
      const auto message = static_cast<size_t>(std::stoul((*found)[1].str()));
      const bool wanted = messages[message]["role"] == "assistant";
      const auto at = static_cast<size_t>(found->position());
      if ((learnt[at] != 0) == wanted && (learnt[at + found->length() - 1] != 0) == wanted) continue;
      return fault(found->str() + (wanted ? " is not learnt: " : " is learnt: ") + shown(text, learnt));
    }
  }

  void compare_turns(const text::Tokenizer& tokenizer, const std::string& text, const std::vector<uint8_t>& learnt) {
    size_t message = 0;
    for (const Json& turn : shape_->at("turns")) {
      ++turns;
      const Json& messages = shape_->at("messages");
      while (messages[message]["role"] != "assistant") ++message;
      // For two messages of the assistant in a row, a template may print no prompt for the second message and no end of
      // the first.
      const bool continues = message > 0 && messages[message - 1]["role"] == "assistant";
      ++message;
      if (turn.is_null() || continues) continue;
      ++exact_turns;
      const auto first = turn[0].get<size_t>(), last = turn[1].get<size_t>();
      if (first == last || first == 0) continue;  // an empty conversation is printed as nothing
      size_t end = last;
      while (end > first && !learnt[end - 1]) --end;
      const bool begins = learnt[first] && !learnt[first - 1];
      const bool whole =
          std::all_of(learnt.begin() + static_cast<ptrdiff_t>(first), learnt.begin() + static_cast<ptrdiff_t>(end),
                      [](uint8_t one) { return one != 0; });
      // After the end of the turn there is only whitespace or the header of the next turn.
      const auto ids = tokenizer.encode(text.substr(first, end - first), {.add_special_tokens = false});
      const bool ends = !ids.empty() && tokenizer.is_special(ids.back());
      const auto all = tokenizer.encode(text.substr(first, last - first), {.add_special_tokens = false});
      const bool has_special = std::ranges::any_of(all, [&](int id) { return tokenizer.is_special(id); });
      if (begins && whole && (ends || !has_special)) continue;
      return fault("the turn at [" + std::to_string(first) + ", " + std::to_string(last) +
                   ") is learnt otherwise: " + shown(text, learnt));
    }
  }

  std::filesystem::path folder_;
  std::vector<std::string> faults_;
  std::string where_;
  const Json* shape_ = nullptr;
};

inline std::vector<std::pair<std::string, std::filesystem::path>> template_files() {
  std::vector<std::pair<std::string, std::filesystem::path>> files;
  for (const auto& entry : std::filesystem::directory_iterator(testing::asset("templates"))) {
    if (entry.path().extension() == ".jinja") files.emplace_back(entry.path().stem().string(), entry.path());
  }
  std::ranges::sort(files);
  return files;
}

// `each` cases for each template of the assets, by the template's name. One Python process draws all cases from the
// seed.
inline Json draw_shapes(const testing::TempFolder& folder, uint64_t seed, int each) {
  std::vector<std::string> arguments = {(folder / "shapes.json").string(), std::to_string(seed), std::to_string(each)};
  for (const auto& [name, path] : template_files()) arguments.push_back(name + "=" + path.string());
  testing::ProcessOptions options;
  options.timeout_seconds = 1000;
  const auto run = testing::run_python("tests/trials/oracle/chat_shapes.py", arguments, options);
  if (run.exit_code != 0) raise(ErrorKind::kInternal, "{}", run.err);
  return Json::parse(read_file(folder / "shapes.json"));
}

}  // namespace tessera::trials
