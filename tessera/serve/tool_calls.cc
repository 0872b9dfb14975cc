#include "tessera/serve/tool_calls.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/json_numbers.h"

namespace tessera::serve {
namespace {

constexpr std::string_view kOpen = "<tool_call>", kClose = "</tool_call>", kSpaces = " \t\r\n";

std::optional<Json> json_of(std::string_view text) {
  try {
    return parse_json(text, "tool call", {.max_depth = 64, .max_keys = 100'000, .exact_numbers = true});
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Reads the JSON of a call. Arguments are an object, or a string with the JSON of an object, under "arguments" or
// "parameters"; a call without them has "{}". nullopt when it is not a call.
std::optional<ToolCall> parse_call(const Json& json) {
  if (!json.is_object() || !json.contains("name") || !json["name"].is_string()) return std::nullopt;
  auto name = json["name"].get<std::string>();
  const auto found = json.contains("arguments") ? json.find("arguments") : json.find("parameters");
  if (found == json.end() || found->is_null()) return ToolCall{std::move(name), "{}"};
  if (found->is_object()) return ToolCall{std::move(name), dump_json(*found)};
  if (!found->is_string()) return std::nullopt;
  const auto& text = found->get_ref<const std::string&>();
  const auto inner = json_of(text);
  if (!inner || !inner->is_object()) return std::nullopt;
  return ToolCall{std::move(name), text};
}

// The length of the longest suffix of `text` that is a proper prefix of `word`.
size_t partial_match_length(std::string_view text, std::string_view word) {
  size_t length = std::min(text.size(), word.size() - 1);
  while (length > 0 && !word.starts_with(text.substr(text.size() - length))) --length;
  return length;
}

}  // namespace

// Reads held_, the text of the model that is not yet in `output`, up to the next opening tag, and returns true; the
// caller then calls advance() again. Returns false when more text of the model is needed. A message that begins with
// '{' or '[' stays in held_ until its end, because only the whole JSON shows whether it is a call. After an opening tag
// the text stays in held_ until the closing tag comes. Other text is added to `output`, except a suffix that may be the
// beginning of a tag, and whitespace that may be before a call.
bool ToolCallReader::advance(ToolCallOutput& output) {
  if (state_ == ReadState::kStart) {
    const auto first = held_.find_first_not_of(kSpaces);
    if (first == held_.npos) return false;
    state_ = held_[first] == '{' || held_[first] == '[' ? ReadState::kJson : ReadState::kText;
  }
  if (state_ == ReadState::kJson) return false;  // finish() reads it
  if (state_ == ReadState::kTagged) {
    const auto end = held_.find(kClose, searched_bytes_);
    if (end == held_.npos) {
      searched_bytes_ = held_.size() - std::min(held_.size(), kClose.size() - 1);
      return false;
    }
    const auto json = json_of(std::string_view(held_).substr(0, end));
    if (const auto call = json ? parse_call(*json) : std::nullopt) {
      output.calls.push_back(*call);
      called_ = true;
    } else {
      output.text += fmt::format("{}{}{}{}", leading_whitespace_, kOpen, held_.substr(0, end), kClose);
    }
    held_.erase(0, end + kClose.size());
    state_ = ReadState::kText;
  }
  // Whitespace before and between calls is dropped, so whitespace is held until other text follows.
  const auto open = held_.find(kOpen);
  const auto text =
      std::string_view(held_).substr(0, open == held_.npos ? held_.size() - partial_match_length(held_, kOpen) : open);
  const auto end = text.find_last_not_of(kSpaces);
  const size_t certain = end == text.npos ? 0 : end + 1;
  output.text += text.substr(0, certain);
  if (open == held_.npos) {
    held_.erase(0, certain);
    return false;
  }
  leading_whitespace_ = text.substr(certain);
  held_.erase(0, open + kOpen.size());
  state_ = ReadState::kTagged;
  searched_bytes_ = 0;
  return true;
}

ToolCallReader::ToolCallOutput ToolCallReader::push(std::string_view text) {
  held_ += text;
  ToolCallOutput output;
  while (advance(output)) {
  }
  return output;
}

// Reads held_, the whole message of the model, as the JSON of one call or of a list of calls. Returns false when it is
// not such JSON, when the list is empty, or when it calls a function that is not in names_.
bool ToolCallReader::read_message(ToolCallOutput& output) const {
  const auto json = json_of(held_);
  if (!json) return false;
  const auto list = json->is_array() ? *json : Json::array({*json});
  std::vector<ToolCall> calls;
  for (const auto& each : list) {
    auto call = parse_call(each);
    if (!call || !names_.contains(call->name)) return false;
    calls.push_back(std::move(*call));
  }
  if (calls.empty()) return false;
  output.calls = std::move(calls);
  return true;
}

ToolCallReader::ToolCallOutput ToolCallReader::finish() {
  ToolCallOutput output;
  if (state_ == ReadState::kJson) {
    if (!read_message(output)) output.text = held_;
  } else if (state_ == ReadState::kTagged) {  // the message ends without the closing tag
    const auto json = json_of(held_);
    if (const auto call = json ? parse_call(*json) : std::nullopt) {
      output.calls.push_back(*call);
    } else {
      output.text = fmt::format("{}{}{}", leading_whitespace_, kOpen, held_);
    }
  } else if (!called_ || held_.find_first_not_of(kSpaces) != held_.npos) {
    output.text = held_;
  }
  held_.clear();
  return output;
}

}  // namespace tessera::serve
