#include "tessera/serve/answer_form.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/base/text/json_numbers.h"
#include "tessera/base/text/quote.h"
#include "tessera/serve/api_error.h"
#include "tessera/serve/thread_priority.h"
#include "tessera/text/grammar/json_schema.h"

namespace tessera::serve {
namespace {

using PartId = text::Grammar::PartId;

constexpr size_t kMaxKeptForms = 16;              // number of forms that are kept
constexpr size_t kLongestKey = size_t{64} << 10;  // bytes; a form with a longer key is not kept
constexpr size_t kSmallForm = size_t{64} << 10;   // bytes; a form of this size is always accepted

PartId format_part(text::JsonParts& json, const JsonReader& format) {
  const auto type = format.string("type");
  if (type == "json_object") {  // llama.cpp and Together allow a schema here
    const auto schema = format.find("schema");
    return schema && !schema->is_null() ? text::JsonSchema(json, *schema).value() : json.any_object();
  }
  if (type != "json_schema") {
    throw ApiError(400,
                   fmt::format("response_format.type: found {}, wanted text, json_object or json_schema", quote(type)),
                   "", "response_format");
  }
  return text::JsonSchema(json, format.at("json_schema").at("schema")).value();
}

// Returns the grammar of the arguments in a call of `function`. If the function has no "parameters", the arguments must
// be the empty object {}, as in OpenAI's API. If "parameters" is an empty schema, any object is allowed.
PartId arguments_part(text::JsonParts& json, const JsonReader& function) {
  const auto parameters = function.find("parameters");
  if (!parameters || parameters->is_null()) return json.braces(json.builder().literal(""));
  const bool any = parameters->value().empty();
  return any ? json.any_object() : text::JsonSchema(json, *parameters).value();
}

// The grammar of a tool call: {"name": NAME, "arguments": OBJECT}, where the key may also be "parameters" (Llama 3).
PartId call_part(text::JsonParts& json, const AnswerFormOptions& options) {
  auto& build = json.builder();
  const auto key = [&](const char* name) { return build.sequence({json.literal(name), json.colon()}); };
  std::vector<PartId> calls;
  for (const auto& tool : options.tools->items()) {
    const auto function = tool.at("function");
    const auto name = function.string("name");
    if (!options.tool.empty() && name != options.tool) continue;
    calls.push_back(json.braces(
        build.sequence({key("name"), json.literal(name), json.comma(),
                        build.choice({key("arguments"), key("parameters")}), arguments_part(json, function)})));
  }
  const auto call = build.choice(calls);
  if (!options.tagged) return call;
  return build.sequence(
      {build.literal("<tool_call>"), json.space(), call, json.space(), build.literal("</tool_call>")});
}

}  // namespace

std::shared_ptr<text::GrammarMasks> AnswerForms::find_kept_form(const std::string& key) {
  const auto at = std::ranges::find_if(recent_forms_, [&](const auto& each) { return each.first == key; });
  if (at == recent_forms_.end()) return nullptr;
  recent_forms_.splice(recent_forms_.begin(), recent_forms_, at);
  return at->second;
}

// Removes forms from recent_forms_, the least recently used first, until it has at most kMaxKeptForms and the forms in
// memory take at most half of kMostBytes. The forms in memory include removed ones that a sequence still uses; these
// are freed when the sequence ends. So recent_forms_ may become empty before the limit is reached.
void AnswerForms::make_room() {
  while (!recent_forms_.empty() && (recent_forms_.size() > kMaxKeptForms || memory_->bytes() > kMostBytes / 2)) {
    recent_forms_.pop_back();
  }
}

std::shared_ptr<text::GrammarMasks> AnswerForms::of(const AnswerFormOptions& options,
                                                    const text::Tokenizer& tokenizer) {
  if (!options.format && !options.tools) return nullptr;
  const auto text_of = [](const auto& json) { return json ? dump_json(json->value()) : std::string(); };
  const auto key =
      fmt::format("{}\n{}\n{}\n{}", text_of(options.format), text_of(options.tools), options.tagged, options.tool);
  // The lock lets only one connection at a time build a form, so many clients cannot take all cores. Building a form
  // takes at most a tenth of a second.
  const std::lock_guard lock(mutex_);
  if (auto masks = find_kept_form(key)) return masks;
  lower_thread_priority();
  make_room();
  if (!vocabulary_) vocabulary_ = std::make_shared<const text::SortedVocabulary>(tokenizer);
  text::GrammarBuilder build;
  text::JsonParts json(build);
  std::vector<PartId> ways;
  if (options.format) ways.push_back(format_part(json, *options.format));
  if (options.tools) ways.push_back(call_part(json, options));
  const auto root = build.choice(ways);
  const auto grammar = std::move(build).finish(root);
  if (grammar.bytes() > kSmallForm && memory_->grammar_bytes() + grammar.bytes() > kMostBytes / 2) {
    throw ApiError(503, "The server is busy with large schemas of other requests. Try again later.", "overloaded");
  }
  auto masks = std::make_shared<text::GrammarMasks>(grammar, vocabulary_, memory_);
  if (key.size() > kLongestKey) return masks;
  recent_forms_.emplace_front(key, masks);
  make_room();
  return masks;
}

}  // namespace tessera::serve
