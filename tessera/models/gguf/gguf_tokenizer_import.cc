#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/gguf/gguf.h"
#include "tessera/models/gguf/gguf_tokenizer.h"

namespace tessera {
namespace {

using json = nlohmann::ordered_json;

constexpr std::string_view kSpaceMark = "\u2581";  // SentencePiece's mark for a space

// The tokenizer of a GGUF file, as read_vocabulary() has read and checked it.
struct GgufVocabulary {
  std::string where;
  bool byte_level = false;
  const PreTokenizerKind* kind = nullptr;  // only for byte-level tokenizers
  std::vector<std::string> tokens;         // without unused tokens at the end
  std::vector<int64_t> types;
  std::vector<float> scores;
  std::vector<std::pair<std::string, std::string>> merges;
  std::unordered_map<std::string_view, size_t> ids;
  std::optional<uint64_t> bos, eos, unk, pad;
  bool add_bos = false, add_eos = false, add_space_prefix = false;
};

const PreTokenizerKind& find_kind(const GgufFile& file) {
  const auto named = file.find_string("tokenizer.ggml.pre");
  if (!named) {
    log_warning(
        "[gguf] {}: names no pre-tokenizer (tokenizer.ggml.pre), so text is split as llama.cpp's '{}' does. For most "
        "models this gives other tokens than in training. Convert the model again with a current llama.cpp.",
        file.path().string(), kDefaultPreTokenizer);
  }
  const auto name = named.value_or(std::string(kDefaultPreTokenizer));
  std::vector<std::string_view> available;
  for (const auto& kind : pre_tokenizer_kinds()) {
    if (std::ranges::find(kind.gguf_names, name) != kind.gguf_names.end()) return kind;
    available.insert(available.end(), kind.gguf_names.begin(), kind.gguf_names.end());
  }
  raise(ErrorKind::kConfig, "[gguf] {}: the pre-tokenizer {} is not supported by this version. Supported: {}.",
        file.path().string(), quote(name), fmt::join(available, ", "));
}

// Gives the begin token and the end tokens the type kControl, even when the file has another type for them. Otherwise
// <|im_end|> in the output of a chat template would be split into several ordinary tokens.
void mark_control_tokens(const GgufFile& file, GgufVocabulary& vocabulary) {
  auto control = gguf_end_tokens(file, static_cast<int64_t>(vocabulary.tokens.size()));
  if (vocabulary.bos) control.push_back(*vocabulary.bos);
  std::vector<std::string> changed;
  for (const uint64_t id : control) {
    auto& type = vocabulary.types[id];
    if (type != kNormal && type != kUserDefined) continue;
    type = kControl;
    changed.push_back(quote(vocabulary.tokens[id]));
  }
  if (changed.empty()) return;
  log_warning("[gguf] {}: {} begin or end texts but have the type of ordinary text; they are read as control tokens",
              vocabulary.where, fmt::join(changed, ", "));
}

std::optional<uint64_t> special_id(const GgufFile& file, const char* name, size_t tokens) {
  const auto key = std::string("tokenizer.ggml.") + name + "_token_id";
  const auto id = file.find_uint(key);
  if (!id || *id == 0xFFFFFFFF) return std::nullopt;  // llama.cpp's value for "none"
  TESSERA_CHECK(*id < tokens, ErrorKind::kFormat, "[gguf] {}: {} is {}, but there are {} tokens", file.path().string(),
                key, *id, tokens);
  return id;
}

void read_merges(const GgufFile& file, GgufVocabulary& vocabulary) {
  const auto* merges = file.find_strings("tokenizer.ggml.merges");
  TESSERA_CHECK(merges, ErrorKind::kFormat, "[gguf] {}: the tokenizer has no tokenizer.ggml.merges", vocabulary.where);
  for (const auto& merge : *merges) {
    // A merge is the string "left right". Byte-level tokens contain no space, and `left` is not empty, so the search
    // for the space between the two tokens starts at byte 1.
    const auto space = merge.find(' ', 1);
    const auto left = merge.substr(0, space);
    const auto right = space == std::string::npos ? std::string() : merge.substr(space + 1);
    const auto& ids = vocabulary.ids;
    TESSERA_CHECK(!right.empty() && ids.contains(left) && ids.contains(right) && ids.contains(left + right),
                  ErrorKind::kFormat, "[gguf] {}: the merge {} does not make a token from two tokens", vocabulary.where,
                  quote(merge));
    vocabulary.merges.emplace_back(left, right);
  }
}

// Computes BPE merges for a SentencePiece vocabulary, which has scores but no merges. Every pair of tokens whose texts
// form a third token is a merge. Merges are sorted by descending score of the third token. For equal scores, a longer
// left token comes first, as in transformers' converter, then the smaller token id.
void derive_merges(GgufVocabulary& vocabulary) {
  constexpr size_t kMaxPieceBytes = 512;
  struct Merge {
    size_t piece, left, right, left_length;
  };
  std::vector<Merge> found;
  const auto normal_id = [&](std::string_view text) -> std::optional<size_t> {
    const auto at = vocabulary.ids.find(text);
    if (at == vocabulary.ids.end() || vocabulary.types[at->second] != kNormal) return std::nullopt;
    return at->second;
  };
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const std::string_view piece = vocabulary.tokens[id];
    if (vocabulary.types[id] != kNormal) continue;
    TESSERA_CHECK(piece.size() <= kMaxPieceBytes, ErrorKind::kFormat,
                  "[gguf] {}: token {} has {} bytes, at most {} are supported", vocabulary.where, id, piece.size(),
                  kMaxPieceBytes);
    size_t characters = 1;
    for (size_t cut = 1; cut < piece.size(); ++cut) {
      if ((static_cast<unsigned char>(piece[cut]) & 0xC0) == 0x80) continue;  // inside a UTF-8 character
      const auto left = normal_id(piece.substr(0, cut)), right = normal_id(piece.substr(cut));
      if (left && right) found.push_back({id, *left, *right, characters});
      ++characters;
    }
  }
  std::ranges::stable_sort(found, [&](const Merge& a, const Merge& b) {
    if (vocabulary.scores[a.piece] != vocabulary.scores[b.piece]) {
      return vocabulary.scores[a.piece] > vocabulary.scores[b.piece];
    }
    if (a.left_length != b.left_length) return a.left_length > b.left_length;
    return std::tie(a.piece, a.left, a.right) < std::tie(b.piece, b.left, b.right);
  });
  for (const auto& merge : found) {
    vocabulary.merges.emplace_back(vocabulary.tokens[merge.left], vocabulary.tokens[merge.right]);
  }
}

// Reads and checks all tokenizer keys. Unused tokens at the end of the vocabulary only pad it to the number of
// embedding rows, so they are dropped. Token texts must be unique, because merges refer to texts.
GgufVocabulary read_vocabulary(const GgufFile& file, int64_t vocab) {
  GgufVocabulary result;
  result.where = file.path().string();
  const auto model = file.find_string("tokenizer.ggml.model").value_or("");
  TESSERA_CHECK(model == "gpt2" || model == "llama", ErrorKind::kConfig,
                "[gguf] {}: the tokenizer model {} is not supported by this version. Supported: gpt2, llama.",
                result.where, quote(model));
  const auto* tokens = file.find_strings("tokenizer.ggml.tokens");
  TESSERA_CHECK(tokens && static_cast<int64_t>(tokens->size()) <= vocab, ErrorKind::kFormat,
                "[gguf] {}: found {} tokens, wanted 1 to {} (the embedding rows)", result.where,
                tokens ? tokens->size() : 0, vocab);
  result.byte_level = model == "gpt2";
  result.tokens = *tokens;
  result.types = file.find_ints("tokenizer.ggml.token_type").value_or(std::vector<int64_t>(tokens->size(), kNormal));
  TESSERA_CHECK(result.types.size() == tokens->size(), ErrorKind::kFormat,
                "[gguf] {}: found {} token types for {} tokens", result.where, result.types.size(), tokens->size());
  while (!result.types.empty() && result.types.back() == kUnused) {
    result.types.pop_back();
    result.tokens.pop_back();
  }
  for (size_t id = 0; id < result.tokens.size(); ++id) {
    TESSERA_CHECK(result.ids.emplace(result.tokens[id], id).second, ErrorKind::kFormat,
                  "[gguf] {}: token {} occurs twice, as {} and {}", result.where, quote(result.tokens[id]),
                  result.ids[result.tokens[id]], id);
  }
  for (auto [member, name] : {std::pair(&result.bos, "bos"), std::pair(&result.eos, "eos"),
                              std::pair(&result.unk, "unknown"), std::pair(&result.pad, "padding")}) {
    *member = special_id(file, name, result.tokens.size());
  }
  mark_control_tokens(file, result);
  if (result.byte_level) {
    result.kind = &find_kind(file);
    read_merges(file, result);
  } else {
    const auto* scores = file.find_floats("tokenizer.ggml.scores");
    TESSERA_CHECK(scores && scores->size() == tokens->size(), ErrorKind::kFormat,
                  "[gguf] {}: found {} token scores for {} tokens", result.where, scores ? scores->size() : 0,
                  tokens->size());
    for (const float score : *scores) {
      TESSERA_CHECK(score == score, ErrorKind::kFormat, "[gguf] {}: a token score is not a number", result.where);
    }
    result.scores = *scores;
    derive_merges(result);
  }
  const bool bos_default = result.byte_level ? result.kind->add_bos : true;
  result.add_bos = file.find_bool("tokenizer.ggml.add_bos_token").value_or(bos_default) && result.bos;
  result.add_eos = file.find_bool("tokenizer.ggml.add_eos_token").value_or(false) && result.eos;
  result.add_space_prefix = file.find_bool("tokenizer.ggml.add_space_prefix").value_or(!result.byte_level);
  return result;
}

json byte_level_step(bool regex) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", regex}};
}

json pre_tokenizer_json(const PreTokenizerKind& kind) {
  json steps = json::array();
  if (kind.digits) steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
  for (const auto regex : kind.split_regexes) {
    steps.push_back({{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}});
  }
  steps.push_back(byte_level_step(kind.byte_level_regex));
  if (steps.size() == 1) return steps[0];
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

// Returns a post-processor that adds BOS and EOS around a sequence, or null when neither is added.
json post_processor_json(const GgufVocabulary& vocabulary) {
  if (!vocabulary.add_bos && !vocabulary.add_eos) return nullptr;
  json special = json::object();
  const auto token = [&](uint64_t id, int type_id) {
    const auto& text = vocabulary.tokens[id];
    special[text] = {{"id", text}, {"ids", {id}}, {"tokens", {text}}};
    return json{{"SpecialToken", {{"id", text}, {"type_id", type_id}}}};
  };
  const auto around = [&](json& out, const char* sequence, int type_id) {
    if (vocabulary.add_bos) out.push_back(token(*vocabulary.bos, type_id));
    out.push_back({{"Sequence", {{"id", sequence}, {"type_id", type_id}}}});
    if (vocabulary.add_eos) out.push_back(token(*vocabulary.eos, type_id));
  };
  json single = json::array(), pair = json::array();
  around(single, "A", 0);
  around(pair, "A", 0);
  around(pair, "B", 1);
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", special}};
}

// Returns the number of tokens in model.vocab of tokenizer.json. The ids of added_tokens follow these tokens, so only
// control and user-defined tokens at the end can be left out of model.vocab.
size_t model_vocabulary_size(const GgufVocabulary& vocabulary) {
  size_t size = vocabulary.tokens.size();
  if (!vocabulary.byte_level) return size;
  while (size > 0 && (vocabulary.types[size - 1] == kControl || vocabulary.types[size - 1] == kUserDefined)) --size;
  return size;
}

// Returns the JSON of tokenizer.json. A byte-level tokenizer splits text with the regular expressions of its
// PreTokenizerKind. For a SentencePiece tokenizer, the normalizer replaces spaces by kSpaceMark, and the decoder undoes
// this, the byte fallback and the prefix space.
json tokenizer_json(const GgufVocabulary& vocabulary) {
  json added = json::array();
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const auto type = vocabulary.types[id];
    if (type != kControl && type != kUserDefined && type != kUnknown) continue;
    added.push_back({{"id", id},
                     {"content", vocabulary.tokens[id]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", type != kUserDefined}});
  }
  json pieces = json::object(), merges = json::array();
  // Append the entries directly: json::operator[] would search all earlier entries for each token, which takes
  // quadratic time.
  auto& entries = pieces.get_ref<json::object_t&>();
  const size_t size = model_vocabulary_size(vocabulary);
  entries.reserve(size);
  for (size_t id = 0; id < size; ++id) entries.emplace_back(vocabulary.tokens[id], id);
  for (const auto& [left, right] : vocabulary.merges) merges.push_back({left, right});

  const bool bytes = vocabulary.byte_level;
  json unk = nullptr, normalizer = nullptr, pre = nullptr, decoder;
  if (bytes) {
    if (vocabulary.kind->nfc) normalizer = {{"type", "NFC"}};
    pre = pre_tokenizer_json(*vocabulary.kind);
    decoder = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
  } else {
    if (vocabulary.unk) unk = vocabulary.tokens[*vocabulary.unk];
    json steps = json::array(), undo = json::array();
    if (vocabulary.add_space_prefix) steps.push_back({{"type", "Prepend"}, {"prepend", kSpaceMark}});
    steps.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kSpaceMark}});
    normalizer = {{"type", "Sequence"}, {"normalizers", steps}};
    undo.push_back({{"type", "Replace"}, {"pattern", {{"String", kSpaceMark}}}, {"content", " "}});
    undo.push_back({{"type", "ByteFallback"}});
    undo.push_back({{"type", "Fuse"}});
    if (vocabulary.add_space_prefix) undo.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
    decoder = {{"type", "Sequence"}, {"decoders", undo}};
  }
  json model = {{"type", "BPE"},
                {"dropout", nullptr},
                {"unk_token", unk},
                {"continuing_subword_prefix", nullptr},
                {"end_of_word_suffix", nullptr},
                {"fuse_unk", !bytes},
                {"byte_fallback", !bytes},
                {"ignore_merges", bytes && vocabulary.kind->ignore_merges}};
  model["vocab"] = std::move(pieces);
  model["merges"] = std::move(merges);
  json result = {{"version", "1.0"},
                 {"truncation", nullptr},
                 {"padding", nullptr},
                 {"added_tokens", std::move(added)},
                 {"normalizer", normalizer},
                 {"pre_tokenizer", pre},
                 {"post_processor", post_processor_json(vocabulary)},
                 {"decoder", decoder}};
  result["model"] = std::move(model);
  return result;
}

}  // namespace

void write_tokenizer_files(const GgufFile& file, const std::filesystem::path& dir, int64_t vocab, int64_t context) {
  const auto vocabulary = read_vocabulary(file, vocab);
  json special = json::object();
  for (const auto& [name, id] : {std::pair("bos_token", vocabulary.bos), std::pair("eos_token", vocabulary.eos),
                                 std::pair("unk_token", vocabulary.unk), std::pair("pad_token", vocabulary.pad)}) {
    // Some files name an ordinary token as the padding token. Such a token is not added to `special`, because programs
    // that read special_tokens_map.json would treat it as a special token everywhere.
    const bool is_text = id && vocabulary.types[*id] == kNormal;
    if (id && !is_text) special[name] = vocabulary.tokens[*id];
  }
  json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"add_bos_token", vocabulary.add_bos},
                 {"add_eos_token", vocabulary.add_eos},
                 {"clean_up_tokenization_spaces", false},
                 {"model_max_length", context}};
  config.update(special);
  if (const auto chat = file.find_string("tokenizer.chat_template")) config["chat_template"] = *chat;
  const auto where = file.path().string();
  publish_file(dir / "tokenizer.json", json_text(tokenizer_json(vocabulary), where, -1));
  publish_file(dir / "tokenizer_config.json", json_text(config, where, 2));
  publish_file(dir / "special_tokens_map.json", json_text(special, where, 2));
}

}  // namespace tessera
