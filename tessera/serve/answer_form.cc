#include "tessera/serve/answer_form.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/base/quote.h"
#include "tessera/serve/api_error.h"
#include "tessera/text/grammar/json_schema.h"

namespace tessera::serve {
namespace {

using Part = text::Grammar::Part;

constexpr size_t kKept = 16;                      // forms, whose masks take up to 100 MB each
constexpr size_t kLongestKey = size_t{64} << 10;  // of those that are kept

Part format_part(text::GrammarBuilder& build, const JsonReader& format) {
  const auto type = format.string("type");
  if (type == "json_object") return text::JsonParts(build).any_object();
  if (type != "json_schema") {
    throw ApiError(400,
                   fmt::format("response_format.type: found {}, wanted text, json_object or json_schema", quote(type)),
                   "", "response_format");
  }
  return text::JsonSchema(build, format.at("json_schema").at("schema")).value();
}

Part arguments_part(text::GrammarBuilder& build, const JsonReader& function) {
  const auto parameters = function.find("parameters");
  const bool any = !parameters || parameters->is_null() || parameters->value().empty();
  return any ? text::JsonParts(build).any_object() : text::JsonSchema(build, *parameters).value();
}

Part call_part(text::GrammarBuilder& build, const WantedForm& wanted) {
  text::JsonParts json(build);
  const auto key = [&](const char* name) { return build.sequence({json.literal(name), json.colon()}); };
  std::vector<Part> calls;
  for (const auto& tool : wanted.tools->items()) {
    const auto function = tool.at("function");
    const auto name = function.string("name");
    if (!wanted.tool.empty() && name != wanted.tool) continue;
    calls.push_back(json.braces(
        build.sequence({key("name"), json.literal(name), json.comma(),
                        build.choice({key("arguments"), key("parameters")}), arguments_part(build, function)})));
  }
  const auto call = build.choice(std::move(calls));
  if (!wanted.tagged) return call;
  return build.sequence(
      {build.literal("<tool_call>"), json.space(), call, json.space(), build.literal("</tool_call>")});
}

}  // namespace

std::shared_ptr<text::GrammarMasks> AnswerForms::known(const std::string& key) {
  const auto at = std::find_if(last_.begin(), last_.end(), [&](const auto& each) { return each.first == key; });
  if (at == last_.end()) return nullptr;
  last_.splice(last_.begin(), last_, at);
  return at->second;
}

std::shared_ptr<text::GrammarMasks> AnswerForms::of(const WantedForm& wanted, const text::Tokenizer& tokenizer) {
  if (!wanted.format && !wanted.tools) return nullptr;
  const Json said = {wanted.format ? wanted.format->value() : Json(), wanted.tools ? wanted.tools->value() : Json(),
                     wanted.tool, wanted.tagged};
  const auto key = said.dump();
  std::shared_ptr<const text::SortedVocabulary> vocabulary;
  {
    const std::lock_guard lock(mutex_);
    if (auto masks = known(key)) return masks;
    if (!vocabulary_) vocabulary_ = std::make_shared<const text::SortedVocabulary>(tokenizer);
    vocabulary = vocabulary_;
  }
  text::GrammarBuilder build;
  std::vector<Part> ways;
  if (wanted.format) ways.push_back(format_part(build, *wanted.format));
  if (wanted.tools) ways.push_back(call_part(build, wanted));
  const auto root = build.choice(std::move(ways));
  auto masks = std::make_shared<text::GrammarMasks>(std::move(build).finish(root), vocabulary);
  if (key.size() > kLongestKey) return masks;
  const std::lock_guard lock(mutex_);
  if (auto others = known(key)) return others;
  last_.emplace_front(key, masks);
  if (last_.size() > kKept) last_.pop_back();
  return masks;
}

}  // namespace tessera::serve
