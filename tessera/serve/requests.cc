#include "tessera/serve/requests.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/text/number.h"
#include "tessera/base/text/quote.h"
#include "tessera/data/records/messages.h"
#include "tessera/serve/api_error.h"
#include "tessera/text/chat/chat_messages.h"
#include "tessera/text/chat/chat_prompt.h"
#include "tessera/text/document.h"
#include "tessera/text/embedding_rows.h"

namespace tessera::serve {
namespace {

constexpr const char* kWhere = "request";
constexpr double kMost = 1e30;

[[noreturn]] void refuse(const std::string& key, const std::string& message) { throw ApiError(400, message, "", key); }

void check_keys(const JsonReader& top, Endpoint endpoint) {
  static const std::set<std::string> both = {"model",
                                             "stream",
                                             "stream_options",
                                             "max_tokens",
                                             "temperature",
                                             "top_p",
                                             "top_k",
                                             "min_p",
                                             "seed",
                                             "stop",
                                             "n",
                                             "presence_penalty",
                                             "frequency_penalty",
                                             "repetition_penalty",
                                             "logprobs",
                                             "logit_bias",
                                             "ignore_eos",
                                             "response_format"};
  static const std::set<std::string> chat = {"messages",    "max_completion_tokens", "top_logprobs",        "tools",
                                             "tool_choice", "parallel_tool_calls",   "chat_template_kwargs"};
  static const std::set<std::string> text = {"prompt", "echo"};
  // Keys that only label a request and have no effect on the answer.
  static const std::set<std::string> ignored_keys = {"user", "metadata", "service_tier", "safety_identifier",
                                                     "prompt_cache_key"};
  // Keys that are accepted only with the value that has no effect on the answer, OpenAI's default.
  static const std::map<std::string, Json> keys_with_neutral_value = {{"best_of", 1},
                                                                      {"echo", false},
                                                                      {"suffix", ""},
                                                                      {"store", false},
                                                                      {"verbosity", "medium"},
                                                                      {"functions", nullptr},
                                                                      {"function_call", nullptr},
                                                                      {"audio", nullptr},
                                                                      {"prediction", nullptr},
                                                                      {"reasoning_effort", nullptr},
                                                                      {"web_search_options", nullptr},
                                                                      {"modalities", Json::array({"text"})}};
  for (const auto& [key, value] : top.members()) {
    if (value.is_null()) continue;  // null counts as absent
    if (both.contains(key) || ignored_keys.contains(key)) continue;
    if ((endpoint == Endpoint::kChat ? chat : text).contains(key)) continue;
    const auto accepted = keys_with_neutral_value.find(key);
    if (accepted == keys_with_neutral_value.end()) {
      refuse(escape(key), fmt::format("Unrecognized request argument: {}", quote(key)));
    }
    if (value.value() == accepted->second) continue;
    refuse(key, fmt::format("{} is not supported: found {}, wanted {} or nothing", key, describe(value.value()),
                            accepted->second.dump()));
  }
}

// Reads "logit_bias", {"TOKEN ID": BIAS}; the bias is added to the logit of the token.
std::vector<std::pair<int64_t, float>> read_bias(const JsonReader& top, const ModelConfig& config) {
  std::vector<std::pair<int64_t, float>> biases;
  const auto given = top.find("logit_bias");
  if (!given || given->is_null()) return biases;
  for (const auto& [key, value] : given->members()) {
    const auto token = parse_number<int64_t>(key);
    if (!token || *token < 0 || *token >= config.vocab_size) {
      refuse("logit_bias",
             fmt::format("logit_bias: found {}, wanted the id of a token, 0 to {}", quote(key), config.vocab_size - 1));
    }
    biases.emplace_back(*token, static_cast<float>(value.as_number(-100, 100)));
  }
  return biases;
}

// Sampling options that the request does not set come from generation_config.json if this file asks for sampling, else
// they have OpenAI's defaults.
void read_sampling(const JsonReader& top, const ServedModel& served, GenerationOptions& options) {
  options = served.defaults;
  const bool files = served.defaults.folder_samples;
  const double temperature = top.number("temperature", files ? options.temperature : 1.0, 0, 100);
  options.sample = temperature > 0;
  if (options.sample) options.temperature = std::max(temperature, 1e-4);
  options.top_k = top.integer("top_k", files ? options.top_k : 0, -1, int64_t{1} << 40);
  options.top_k = std::max<int64_t>(options.top_k, 0);
  options.top_p = top.number("top_p", files ? options.top_p : 1.0, 0, 1);
  if (options.top_p == 0) options.top_p = 1e-9;
  options.min_p = top.number("min_p", options.min_p, 0, 1);
  options.repetition_penalty = top.number("repetition_penalty", options.repetition_penalty, 1e-6, kMost);
  options.presence_penalty = top.number("presence_penalty", 0, -2, 2);
  options.frequency_penalty = top.number("frequency_penalty", 0, -2, 2);
  if (top.has("seed")) {
    options.seed = static_cast<uint64_t>(
        top.integer("seed", 0, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()));
  } else {  // without a seed each request samples differently
    std::random_device random;
    options.seed = uint64_t{random()} << 32 | random();
  }
  options.logit_bias = read_bias(top, served.config);
  if (top.boolean("ignore_eos", false)) options.stop_tokens.clear();
}

std::vector<std::string> read_stops(const JsonReader& top, const Limits& limits) {
  std::vector<std::string> stops;
  const auto stop = top.find("stop");
  if (!stop || stop->is_null()) return stops;
  if (stop->is_array()) {
    for (const auto& each : stop->items()) stops.push_back(each.as_string());
  } else {
    stops.push_back(stop->as_string());
  }
  constexpr size_t kMostBytes = 1024;
  if (static_cast<int64_t>(stops.size()) > limits.stops) {
    refuse("stop", fmt::format("stop: found {} strings, wanted at most {}", stops.size(), limits.stops));
  }
  for (const auto& each : stops) {
    if (each.empty() || each.size() > kMostBytes) {
      refuse("stop", fmt::format("stop: found a string of {} bytes, wanted 1 to {}", each.size(), kMostBytes));
    }
  }
  return stops;
}

std::optional<int64_t> read_log_probs(const JsonReader& top, Endpoint endpoint, const Limits& limits) {
  if (endpoint == Endpoint::kText) {
    if (!top.has("logprobs")) return std::nullopt;
    return top.integer("logprobs", 0, 0, limits.top_logprobs);
  }
  const bool wanted = top.boolean("logprobs", false);
  const int64_t likeliest = top.integer("top_logprobs", 0, 0, limits.top_logprobs);
  if (likeliest > 0 && !wanted) refuse("top_logprobs", "top_logprobs is set without logprobs: true. Set both.");
  return wanted ? std::optional(likeliest) : std::nullopt;
}

struct Prompt {
  std::vector<int64_t> tokens{};
  std::optional<std::string> text{};  // nullopt when the prompt was given as token ids
};

Prompt prompt_of(const JsonReader& prompt, const ServedModel& served) {
  Prompt found;
  if (!prompt.is_array()) {
    found.text = prompt.as_string();
    const auto encoded = text::encode_document(served.tokenizer, *found.text).ids;
    text::check_embedding_rows(served.tokenizer, encoded, served.config.vocab_size, "prompt");
    found.tokens.assign(encoded.begin(), encoded.end());
    return found;
  }
  for (const auto& id : prompt.items()) found.tokens.push_back(id.as_integer(0, served.config.vocab_size - 1));
  return found;
}

std::string text_of(const Prompt& prompt, const text::Tokenizer& tokenizer) {
  if (prompt.text) return *prompt.text;
  const std::vector<text::TokenId> ids(prompt.tokens.begin(), prompt.tokens.end());
  return tokenizer.decode(ids, false);
}

// Reads "prompt": a text, a list of token ids, or a list of at most `max_prompts` texts or lists of token ids.
std::vector<Prompt> text_prompts(const JsonReader& top, const ServedModel& served, int64_t max_prompts) {
  const auto prompt = top.at("prompt");
  if (!prompt.is_array()) return {prompt_of(prompt, served)};
  const auto items = prompt.items();
  if (items.empty()) refuse("prompt", "prompt: found an empty list, wanted text or token ids");
  if (items[0].value().is_number()) return {prompt_of(prompt, served)};
  if (static_cast<int64_t>(items.size()) > max_prompts) {
    refuse("prompt",
           fmt::format("prompt: found {} prompts, this server allows at most {} choices per request (prompts x n)",
                       items.size(), served.limits.choices));
  }
  std::vector<Prompt> prompts;
  for (const auto& item : items) prompts.push_back(prompt_of(item, served));
  return prompts;
}

// The names of the functions in "tools".
std::set<std::string> names_of(const JsonReader& tools) {
  std::set<std::string> names;
  for (const auto& tool : tools.items()) {
    const auto type = tool.string("type");
    if (type != "function") refuse("tools", fmt::format("a tool of type {} is not supported", quote(type)));
    names.insert(tool.at("function").string("name"));
  }
  return names;
}

// Reads "tool_choice" and returns "auto", "none" or "required". For a named tool the result is "required", and
// form.tool receives the name.
std::string read_tool_choice(const JsonReader& top, const std::set<std::string>& names, AnswerFormOptions& form) {
  const auto choice = top.find("tool_choice");
  if (!choice || choice->is_null()) return "auto";
  if (!choice->is_object()) {
    auto word = choice->as_string();
    if (word == "auto" || word == "none") return word;
    if (word != "required") choice->fail("\"auto\", \"none\", \"required\", or a function by its name");
  } else {
    if (choice->string("type") != "function") choice->at("type").fail("\"function\"");
    form.tool = choice->at("function").string("name");
    if (!names.contains(form.tool)) choice->at("function").at("name").fail("the name of one of the tools");
  }
  if (names.empty()) refuse("tool_choice", "tool_choice: a tool call is required, but there are no tools");
  return "required";
}

// Returns the prompt tokens of a chat. `prompt_tools` receives the names of the tools in the prompt. `form` receives
// the tools in two cases: the answer must be a tool call (`form` then loses its response format), or the request has a
// response format, and the answer may be a tool call instead of a text in this format. The chat is rendered with and
// without tools: equal texts show that the template ignores tools, which is an error. Tool calls are expected between
// <tool_call> tags if the text rendered with tools mentions this tag.
std::vector<int64_t> chat_prompt(const JsonReader& top, const ServedModel& served, std::set<std::string>& prompt_tools,
                                 AnswerFormOptions& form) {
  if (!served.chat) refuse("messages", "this model has no chat template; use /v1/completions");
  const auto messages =
      text::adapt_messages(*served.chat, data::openai_messages(top.at("messages").value(), "messages", kWhere));
  Json extra = Json::object();
  if (const auto more = top.find("chat_template_kwargs"); more && !more->is_null()) {
    if (!more->is_object()) more->fail("an object");
    extra = more->value();
  }
  const auto tools = top.find("tools");
  const auto names = tools && !tools->is_null() ? names_of(*tools) : std::set<std::string>{};
  const auto choice = read_tool_choice(top, names, form);
  if (!names.empty() && choice != "none") {
    prompt_tools = names;
    const auto without = served.chat->render(messages, true, extra).text;
    extra["tools"] = tools->value();
    const auto with = served.chat->render(messages, true, extra).text;
    if (with == without) refuse("tools", "this model's chat template does not support tools");
    if (choice == "required" || form.format) {
      form.tools = tools;
      form.tagged = with.find("<tool_call>") != with.npos;
    }
    if (choice == "required") form.format.reset();
  }
  const auto ids = text::chat_prompt(*served.chat, served.tokenizer, messages, extra);
  text::check_embedding_rows(served.tokenizer, ids, served.config.vocab_size, "messages");
  return {ids.begin(), ids.end()};
}

// The number of new tokens that the request allows. 0 is accepted only with `echo`, and then the prompt may fill the
// whole context. ApiError "context_length_exceeded", with OpenAI's wording, when prompt and new tokens do not fit.
int64_t read_max_tokens(const JsonReader& top, const ServedModel& served, Endpoint endpoint, int64_t prompt,
                        bool echo) {
  constexpr int64_t kCompletionDefault = 16;  // OpenAI's default of max_tokens for completions
  constexpr int64_t kHuge = int64_t{1} << 40;
  const int64_t context = std::min(served.config.context_tokens, served.cache_tokens), room = context - prompt;
  const char* key = top.has("max_completion_tokens") ? "max_completion_tokens" : "max_tokens";
  const bool given = top.has(key);
  const int64_t default_max_tokens = endpoint == Endpoint::kText ? std::min(room, kCompletionDefault) : room;
  const int64_t max_tokens = given ? top.integer(key, 1, echo ? 0 : 1, kHuge) : default_max_tokens;
  const int64_t least_room = given && max_tokens == 0 ? 0 : 1;
  if (room < least_room || max_tokens > room) {
    throw ApiError(
        400,
        fmt::format("This model's maximum context length is {} tokens. However, you requested {} tokens ({} in the "
                    "{}, {} in the completion). Please reduce the length of the {}.",
                    context, prompt + std::max<int64_t>(max_tokens, given ? max_tokens : 1), prompt,
                    endpoint == Endpoint::kChat ? "messages" : "prompt", std::max<int64_t>(max_tokens, 1),
                    room < 1 ? "prompt" : "prompt or completion"),
        "context_length_exceeded", endpoint == Endpoint::kChat ? "messages" : "prompt");
  }
  return max_tokens;
}

// Checks the keys of "response_format", because a key that restricts the answer must not be ignored. AnswerForms raises
// the error for an unknown type.
void check_format(const JsonReader& format) {
  static const std::map<std::string, const char*> kNarrowedBy = {
      {"text", nullptr}, {"json_object", "schema"}, {"json_schema", "json_schema"}};
  const auto type = format.string("type");
  const auto found = kNarrowedBy.find(type);
  if (found == kNarrowedBy.end()) return;
  const char* narrows = found->second;
  for (const auto& [key, value] : format.members()) {
    const bool is_known = key == "type" || value.is_null() || (narrows && key == narrows);
    if (!is_known) {
      refuse("response_format", fmt::format("response_format: found {}, wanted {} for type {}", quote(key),
                                            narrows ? fmt::format("type and {}", narrows) : "type alone", quote(type)));
    }
  }
}

// Everything is checked before a sequence is queued. The grammar of the answer is built once and shared by all choices;
// each choice has its own constraint and, from the second on, its own seed.
CompletionRequest read_object(const Json& json, Endpoint endpoint, const ServedModel& served) {
  const JsonReader top(json, kWhere);
  check_keys(top, endpoint);
  const auto model = top.string("model", served.name);
  if (!served.has_name(model)) {
    throw ApiError(404,
                   fmt::format("The model {} does not exist here: this server has '{}'", quote(model), served.name),
                   "model_not_found", "model");
  }
  CompletionRequest request;
  request.stream = top.boolean("stream", false);
  if (const auto options = top.find("stream_options"); options && !options->is_null()) {
    if (!request.stream) refuse("stream_options", "stream_options is set without stream: true. Set both.");
    request.stream_usage = options->boolean("include_usage", false);
    for (const auto& [key, value] : options->members()) {
      const bool is_known = key == "include_usage" || value.is_null() || value.value() == Json(false);
      if (!is_known) refuse("stream_options", fmt::format("stream_options: {} is not supported", quote(key)));
    }
  }
  GenerationOptions options;
  read_sampling(top, served, options);
  request.stop = read_stops(top, served.limits);
  request.log_probs = read_log_probs(top, endpoint, served.limits);
  request.echo = endpoint == Endpoint::kText && top.boolean("echo", false);
  request.one_tool_call = endpoint == Endpoint::kChat && !top.boolean("parallel_tool_calls", true);
  const int64_t each = top.integer("n", 1, 1, served.limits.choices);
  AnswerFormOptions form;
  if (const auto format = top.find("response_format"); format && !format->is_null()) {
    check_format(*format);
    if (format->string("type") != "text") form.format = format;
  }
  const auto prompts = endpoint == Endpoint::kChat
                           ? std::vector<Prompt>{{.tokens = chat_prompt(top, served, request.tools, form)}}
                           : text_prompts(top, served, served.limits.choices / each);
  const auto masks = served.forms->of(form, served.tokenizer);
  for (const auto& prompt : prompts) {
    const auto given = static_cast<int64_t>(prompt.tokens.size());
    request.prompt_tokens += given;
    const int64_t max_tokens = read_max_tokens(top, served, endpoint, given, request.echo);
    request.no_new_tokens = max_tokens == 0;
    options.max_new_tokens = std::max<int64_t>(max_tokens, 1);
    // With no_new_tokens the engine still generates one token, which is dropped. This token is never an input of the
    // model, so prompt and token may exceed the context by one token.
    options.context_tokens = request.no_new_tokens ? given + 1 : 0;
    generation_capacity(served.config, prompt.tokens, options);
    const auto echoed = request.echo ? text_of(prompt, served.tokenizer) : std::string();
    auto of_choice = options;  // choice 0 keeps the seed, so it equals the answer of a request with n = 1
    for (int64_t i = 0; i < each; ++i) {
      if (masks) of_choice.constraint = std::make_shared<text::TokenConstraint>(masks, options.stop_tokens);
      request.choices.push_back({prompt.tokens, of_choice, echoed});
      of_choice.seed += 0x9E3779B97F4A7C15;
    }
  }
  return request;
}

}  // namespace

CompletionRequest read_request(std::string_view body, Endpoint endpoint, const ServedModel& served) {
  try {
    constexpr JsonLimits kJson{
        .max_bytes = size_t{1} << 30, .max_depth = 64, .max_keys = 100'000, .exact_numbers = true};
    return read_object(parse_json_object(body, kWhere, kJson), endpoint, served);
  } catch (const Error& error) {
    throw ApiError(error.kind() == ErrorKind::kInternal ? 500 : 400, error.what());
  }
}

}  // namespace tessera::serve
