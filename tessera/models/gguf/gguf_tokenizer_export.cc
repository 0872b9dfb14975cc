#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/gguf/gguf_writer.h"
#include "tessera/models/config/config.h"
#include "tessera/models/config/end_tokens.h"
#include "tessera/models/gguf/gguf_tokenizer.h"
#include "tessera/text/tokenizer.h"

namespace tessera {
namespace {

using json = nlohmann::ordered_json;

constexpr std::string_view kVisibleSpace = "\u2581";  // SentencePiece's mark for a space

// The vocabulary of a tokenizer.json in the form that GGUF stores: one text and type for each embedding row.
struct HfVocabulary {
  std::string where;
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<std::string> merges;  // "left right"
  std::vector<std::string> merged;  // result of each merge
  std::unordered_map<std::string, int64_t> ids;
  std::unordered_set<int64_t> listed;  // ids of added_tokens in tokenizer.json, also ids beyond the embedding rows
};

const json* find(const json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::string text_or(const json& object, const char* key, const std::string& absent) {
  const auto* value = find(object, key);
  return value && value->is_string() ? value->get<std::string>() : absent;
}

bool flag_or(const json& object, const char* key, bool absent) {
  const auto* value = find(object, key);
  return value && value->is_boolean() ? value->get<bool>() : absent;
}

// Sets the text and type of row `id`. A row may be set twice only with the same text; this happens for added tokens
// that are also in the vocabulary.
void add_token(HfVocabulary& vocabulary, const std::string& text, const json& id, int32_t type) {
  const bool valid = id.is_number_unsigned() && id.get<uint64_t>() < vocabulary.tokens.size();
  TESSERA_CHECK(valid, ErrorKind::kFormat,
                "[gguf] {}: token {} has the id {}, but config.json has a vocabulary of {} tokens", vocabulary.where,
                quote(text), id.dump(), vocabulary.tokens.size());
  const auto at = id.get<size_t>();
  const bool free = vocabulary.types[at] == kUnused || vocabulary.tokens[at] == text;
  TESSERA_CHECK(free, ErrorKind::kFormat, "[gguf] {}: tokens {} and {} have the same id {}", vocabulary.where,
                quote(vocabulary.tokens[at]), quote(text), at);
  vocabulary.tokens[at] = text;
  vocabulary.types[at] = type;
  vocabulary.ids[text] = static_cast<int64_t>(at);
}

bool is_byte_token(const std::string& text) {
  return text.size() == 6 && text.starts_with("<0x") && text.back() == '>' && std::isxdigit(text[3]) &&
         std::isxdigit(text[4]);
}

// A merge is the string "left right" in older files and the list [left, right] in newer files. GGUF stores strings
// "left right", so neither `left` nor `right` may contain a space.
void read_merges(const json& model, HfVocabulary& vocabulary) {
  const auto* merges = find(model, "merges");
  TESSERA_CHECK(merges && merges->is_array(), ErrorKind::kFormat, "[gguf] {}: the model has no merges",
                vocabulary.where);
  for (const auto& merge : *merges) {
    std::string left, right;
    if (merge.is_string()) {
      const auto& text = merge.get_ref<const std::string&>();
      const auto space = text.find(' ', 1);
      if (space != std::string::npos) left = text.substr(0, space), right = text.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get<std::string>(), right = merge[1].get<std::string>();
    }
    TESSERA_CHECK(!left.empty() && !right.empty(), ErrorKind::kFormat, "[gguf] {}: {} is not a merge of two tokens",
                  vocabulary.where, quote(json(merge).dump()));
    const bool spaces = left.find(' ') != std::string::npos || right.find(' ') != std::string::npos;
    TESSERA_CHECK(!spaces, ErrorKind::kConfig,
                  "[gguf] {}: the merge of {} and {} contains a space, which GGUF cannot store", vocabulary.where,
                  quote(left), quote(right));
    vocabulary.merges.push_back(left + " " + right);
    vocabulary.merged.push_back(left + right);
  }
}

void add_added_token(HfVocabulary& vocabulary, const json& token, const std::string& unk, bool sentence_piece) {
  const auto text = text_or(token, "content", "");
  TESSERA_CHECK(token.is_object() && token.contains("id") && !text.empty(), ErrorKind::kFormat,
                "[gguf] {}: an added token has no id or content", vocabulary.where);
  const auto& id = token["id"];
  if (id.is_number_unsigned()) vocabulary.listed.insert(id.get<int64_t>());
  // A token without embedding row cannot be an input of the model, so it is left out. An example is Gemma's image token
  // in a model without images.
  if (id.is_number_unsigned() && id.get<uint64_t>() >= vocabulary.tokens.size()) {
    log_warning("[gguf] {}: token {} has the id {} beyond the model's {} rows and is left out", vocabulary.where,
                quote(text), id.dump(), vocabulary.tokens.size());
    return;
  }
  const bool unknown = sentence_piece && text == unk;
  const bool special = flag_or(token, "special", false);
  add_token(vocabulary, text, id, unknown ? kUnknown : special ? kControl : kUserDefined);
  if (sentence_piece && !unknown && !special) {
    // llama.cpp searches for user-defined tokens in the original text, before it replaces spaces by kVisibleSpace. So
    // store their texts with spaces.
    auto& stored = vocabulary.tokens[id.get<size_t>()];
    for (size_t at = 0; (at = stored.find(kVisibleSpace, at)) != std::string::npos; ++at) {
      stored.replace(at, kVisibleSpace.size(), " ");
    }
  }
}

HfVocabulary read_vocabulary(const json& tokenizer, const std::string& where, int64_t size, bool sentence_piece) {
  HfVocabulary result;
  result.where = where;
  // GGUF needs a text for every embedding row. Rows without a token keep this placeholder text and the type kUnused.
  for (int64_t id = 0; id < size; ++id) result.tokens.push_back(fmt::format("[PAD{}]", id));
  result.types.assign(result.tokens.size(), kUnused);
  const auto& model = tokenizer.at("model");
  const auto* vocab = find(model, "vocab");
  TESSERA_CHECK(vocab && vocab->is_object(), ErrorKind::kFormat, "[gguf] {}: the model has no vocabulary", where);
  const auto unk = text_or(model, "unk_token", "");
  for (const auto& [text, id] : vocab->items()) {
    int32_t type = kNormal;
    if (sentence_piece && is_byte_token(text)) type = kByte;
    if (sentence_piece && text == unk) type = kUnknown;
    add_token(result, text, id, type);
  }
  if (const auto* added = find(tokenizer, "added_tokens")) {
    for (const auto& token : *added) add_added_token(result, token, unk, sentence_piece);
  }
  read_merges(model, result);
  return result;
}

// Adds to `vocabulary` the tokens that tokenizer_config.json lists but tokenizer.json does not.
void add_config_tokens(HfVocabulary& vocabulary, const text::Tokenizer& tokenizer, const std::string& unk,
                       bool sentence_piece) {
  for (size_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const auto token = static_cast<text::TokenId>(id);
    if (!tokenizer.is_added(token) || vocabulary.listed.contains(token)) continue;
    if (id < vocabulary.types.size() && vocabulary.types[id] != kUnused) continue;  // a token of the vocabulary
    add_added_token(vocabulary,
                    {{"content", tokenizer.id_to_token(token)}, {"id", id}, {"special", tokenizer.is_special(token)}},
                    unk, sentence_piece);
  }
}

// Returns the steps of a pre-tokenizer or normalizer, which may be a Sequence or a single step.
std::vector<json> steps_of(const json& tokenizer, const char* key, const char* list) {
  const auto* step = find(tokenizer, key);
  if (!step) return {};
  if (text_or(*step, "type", "") != "Sequence") return {*step};
  const auto* steps = find(*step, list);
  return steps && steps->is_array() ? steps->get<std::vector<json>>() : std::vector<json>{};
}

// Returns the PreTokenizerKind that splits text exactly as the pre_tokenizer of this tokenizer.json does. Error kConfig
// for a pre-tokenizer without such a kind, because a kind that splits only nearly the same would give other tokens
// without notice.
const PreTokenizerKind& match_kind(const json& tokenizer, const std::string& where) {
  PreTokenizerKind seen;
  std::vector<std::string> regexes;
  bool strange = false;
  for (const auto& step : steps_of(tokenizer, "pre_tokenizer", "pretokenizers")) {
    const auto type = text_or(step, "type", "");
    if (type == "Digits") {
      seen.digits = flag_or(step, "individual_digits", false);
      strange = strange || !seen.digits;
    } else if (type == "Split") {
      const auto* pattern = find(step, "pattern");
      strange = strange || text_or(step, "behavior", "") != "Isolated" || flag_or(step, "invert", false);
      regexes.push_back(pattern ? text_or(*pattern, "Regex", "?") : "?");
    } else if (type == "ByteLevel") {
      seen.byte_level_regex = flag_or(step, "use_regex", true);
      strange = strange || flag_or(step, "add_prefix_space", true);
    } else {
      strange = true;
    }
  }
  const auto& kinds = pre_tokenizer_kinds();
  const auto found = std::ranges::find_if(kinds, [&](const PreTokenizerKind& kind) {
    const bool same_splits = std::ranges::equal(kind.split_regexes, regexes);
    return kind.digits == seen.digits && same_splits && kind.byte_level_regex == seen.byte_level_regex;
  });
  TESSERA_CHECK(found != kinds.end() && !strange, ErrorKind::kConfig,
                "[gguf] {}: this pre_tokenizer has no counterpart in GGUF that this version can write. Supported are "
                "those of smollm, llama-bpe, qwen2, gpt-2 and default.",
                where);
  return *found;
}

// Whether the post-processor puts this token at the start (`first`) or at the end of a sequence.
bool post_processor_adds(const json& tokenizer, const std::string& token, bool first) {
  for (const auto& step : steps_of(tokenizer, "post_processor", "processors")) {
    const auto* single = find(step, "single");
    if (!single || !single->is_array() || single->empty()) continue;
    const auto* special = find(first ? single->front() : single->back(), "SpecialToken");
    if (special && text_or(*special, "id", "") == token) return true;
  }
  return false;
}

// Returns the text of "bos_token" or a similar key, whose value is a string or an object with the content.
std::string special_token(const json& config, const char* key) {
  const auto* value = find(config, key);
  if (!value) return "";
  return value->is_string() ? value->get<std::string>() : text_or(*value, "content", "");
}

std::string chat_template(const std::filesystem::path& dir, const json& config) {
  constexpr size_t kMaxBytes = size_t{16} << 20;
  if (std::filesystem::exists(dir / "chat_template.jinja")) return read_file(dir / "chat_template.jinja", kMaxBytes);
  const auto* value = find(config, "chat_template");
  if (!value) return "";
  if (value->is_string()) return value->get<std::string>();
  if (!value->is_array()) return "";
  for (const auto& named : *value) {
    if (text_or(named, "name", "") == "default") return text_or(named, "template", "");
  }
  return "";
}

// Returns the id of the token that `config`, the JSON of tokenizer_config.json, has under `key`. Returns nullopt when
// there is no such key, or when the vocabulary does not have the token.
std::optional<int64_t> id_of_special(const HfVocabulary& vocabulary, const json& config, const char* key) {
  const auto found = vocabulary.ids.find(special_token(config, key));
  return found == vocabulary.ids.end() ? std::nullopt : std::optional(found->second);
}

void mark_as_control(HfVocabulary& vocabulary, int64_t id) {
  auto& type = vocabulary.types.at(static_cast<size_t>(id));
  if (type == kNormal || type == kUserDefined) type = kControl;
}

// Writes one end token into each of the three keys eos_token_id, eot_token_id and eom_token_id. llama.cpp recognises
// some end tokens by their text (is_known_end), so end tokens that it does not recognise get the keys first. <|eom_id|>
// gets eom_token_id if there is another token for eot_token_id.
void set_end_keys(const HfVocabulary& vocabulary, std::optional<int64_t> eos, std::span<const int64_t> ends,
                  GgufWriter& writer) {
  std::vector<int64_t> others(ends.begin(), ends.end());
  if (!eos && !others.empty()) eos = others.front();
  std::erase(others, eos.value_or(-1));
  const auto text_of = [&](int64_t id) -> const std::string& { return vocabulary.tokens[static_cast<size_t>(id)]; };
  std::stable_partition(others.begin(), others.end(), [&](int64_t id) { return !is_known_end(text_of(id)); });
  if (others.size() > 1 && text_of(others[0]) == "<|eom_id|>") std::swap(others[0], others[1]);
  const auto set = [&](const char* key, int64_t id) {
    writer.set(fmt::format("tokenizer.ggml.{}_token_id", key), static_cast<uint32_t>(id));
  };
  if (eos) set("eos", *eos);
  if (!others.empty()) set("eot", others[0]);
  if (others.size() > 1) set("eom", others[1]);
  std::vector<std::string> lost;
  for (size_t i = 2; i < others.size(); ++i) {
    if (!is_known_end(text_of(others[i]))) lost.push_back(quote(text_of(others[i])));
  }
  if (lost.empty()) return;
  log_warning("[gguf] {}: texts end at {}, too, but GGUF has keys for only three end tokens", vocabulary.where,
              fmt::join(lost, ", "));
}

// Whether generation_config.json or config.json lists end tokens. If neither does, the end tokens are the default ids
// of the model's class, and such an id may be any token in this vocabulary.
bool lists_ends(const std::filesystem::path& dir) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    if (!std::filesystem::exists(dir / name)) continue;
    if (find(read_json_object(dir / name), "eos_token_id")) return true;
  }
  return false;
}

// Returns SentencePiece scores that give the order of the merges: an earlier merge gets a better score. The score of a
// token that no merge produces is never used.
std::vector<float> scores_of(const HfVocabulary& vocabulary) {
  std::vector<float> scores(vocabulary.tokens.size(), -1e9F);
  for (size_t rank = vocabulary.merged.size(); rank-- > 0;) {
    const auto found = vocabulary.ids.find(vocabulary.merged[rank]);
    if (found != vocabulary.ids.end()) scores[static_cast<size_t>(found->second)] = -static_cast<float>(rank);
  }
  for (size_t id = 0; id < scores.size(); ++id) {
    if (vocabulary.types[id] != kNormal) scores[id] = 0;
  }
  return scores;
}

bool has_prepend(const json& tokenizer) {
  const auto normalizers = steps_of(tokenizer, "normalizer", "normalizers");
  const auto pre_tokenizers = steps_of(tokenizer, "pre_tokenizer", "pretokenizers");
  const bool normalizer =
      std::ranges::any_of(normalizers, [](const json& step) { return text_or(step, "type", "") == "Prepend"; });
  return normalizer || std::ranges::any_of(pre_tokenizers, [](const json& step) {
           return text_or(step, "type", "") == "Metaspace" && text_or(step, "prepend_scheme", "always") != "never";
         });
}

}  // namespace

// A tokenizer with byte_fallback is SentencePiece's ("llama", with scores); any other BPE tokenizer is byte-level
// ("gpt2", with merges). Special tokens and end tokens get the type of control tokens.
void set_tokenizer_keys(const std::filesystem::path& dir, const ModelConfig& model_config, GgufWriter& writer) {
  const auto where = (dir / "tokenizer.json").string();
  const auto tokenizer = read_json_object(dir / "tokenizer.json");
  const auto config = std::filesystem::exists(dir / "tokenizer_config.json")
                          ? read_json_object(dir / "tokenizer_config.json")
                          : json::object();
  const auto* model = find(tokenizer, "model");
  TESSERA_CHECK(model && (text_or(*model, "type", "BPE") == "BPE"), ErrorKind::kConfig,
                "[gguf] {}: only BPE tokenizers can be written", where);
  const bool sentence_piece = flag_or(*model, "byte_fallback", false);
  auto vocabulary = read_vocabulary(tokenizer, where, model_config.vocab_size, sentence_piece);
  const auto own = text::Tokenizer::from_folder(dir);
  add_config_tokens(vocabulary, own, text_or(*model, "unk_token", ""), sentence_piece);
  const std::string pre_tokenizer(sentence_piece ? kDefaultPreTokenizer
                                                 : match_kind(tokenizer, where).gguf_names.front());
  for (const char* key : {"bos_token", "eos_token", "pad_token"}) {
    if (const auto id = id_of_special(vocabulary, config, key)) mark_as_control(vocabulary, *id);
  }
  auto ends = end_tokens(dir, model_config, own, find_chat_template(dir));
  // If neither generation_config.json nor config.json lists end tokens, an id in `ends` whose token has the type
  // kNormal can only be a default id of the model's class, and the token may have another meaning in this vocabulary.
  // Such ids are removed from `ends`.
  if (!lists_ends(dir)) {
    std::erase_if(ends, [&](int64_t end) { return vocabulary.types.at(static_cast<size_t>(end)) == kNormal; });
  }
  for (const int64_t end : ends) mark_as_control(vocabulary, end);

  writer.set("tokenizer.ggml.model", std::string(sentence_piece ? "llama" : "gpt2"));
  writer.set("tokenizer.ggml.pre", pre_tokenizer);
  writer.set("tokenizer.ggml.tokens", GgufArray{vocabulary.tokens});
  writer.set("tokenizer.ggml.token_type", GgufArray{vocabulary.types});
  if (sentence_piece) {
    writer.set("tokenizer.ggml.scores", GgufArray{scores_of(vocabulary)});
  } else {
    writer.set("tokenizer.ggml.merges", GgufArray{vocabulary.merges});
  }
  for (const auto& [key, name] : {std::pair("bos", "bos_token"), {"unknown", "unk_token"}, {"padding", "pad_token"}}) {
    const auto id = id_of_special(vocabulary, config, name);
    if (id) writer.set(fmt::format("tokenizer.ggml.{}_token_id", key), static_cast<uint32_t>(*id));
  }
  set_end_keys(vocabulary, id_of_special(vocabulary, config, "eos_token"), ends, writer);
  for (const auto& [key, name, first] :
       {std::tuple("add_bos_token", "bos_token", true), {"add_eos_token", "eos_token", false}}) {
    const auto token = special_token(config, name);
    writer.set(fmt::format("tokenizer.ggml.{}", key), !token.empty() && post_processor_adds(tokenizer, token, first));
  }
  writer.set("tokenizer.ggml.add_space_prefix", sentence_piece && has_prepend(tokenizer));
  const auto chat = chat_template(dir, config);
  if (!chat.empty()) writer.set("tokenizer.chat_template", chat);
}

}  // namespace tessera
