#include "tessera/text/tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/warn_once.h"
#include "tessera/text/tokenizer/added_tokens.h"
#include "tessera/text/tokenizer/bpe.h"
#include "tessera/text/tokenizer/config_tokens.h"
#include "tessera/text/tokenizer/decoder.h"
#include "tessera/text/tokenizer/encode_scratch.h"
#include "tessera/text/tokenizer/normalizer.h"
#include "tessera/text/tokenizer/post_processor.h"
#include "tessera/text/tokenizer/pre_tokenizer.h"
#include "tessera/text/tokenizer/special_tokens.h"
#include "tessera/text/tokenizer/tokenizer_file.h"
#include "tessera/text/tokenizer/unicode.h"

namespace tessera::text {
namespace {

constexpr size_t kMaxFileBytes = size_t{1} << 30;
constexpr size_t kShownTokenBytes = 40;

// Flags of a token.
constexpr uint8_t kExists = 1, kSpecial = 2, kAdded = 4;

TokenizerFile& checked_bpe(TokenizerFile& file) {
  const JsonReader model = file.root().at("model");
  const std::string type = model.string("type", "BPE");
  if (type != "BPE") model.at("type").fail("\"BPE\"");
  return file;
}

// Copies `text` to `out` as valid UTF-8. Each invalid byte sequence becomes U+FFFD, whose origin is the range of the
// bytes that it replaces.
void make_valid(std::string_view text, bool track, AlignedText& out) {
  out.clear();
  out.tracked = track;
  for (size_t at = 0; at < text.size();) {
    const size_t good = valid_utf8_prefix(text.substr(at));
    for (const size_t end = at + good; at < end;) {
      const size_t length = track ? utf8_length(text[at]) : end - at;
      out.append(text.substr(at, length), {static_cast<uint32_t>(at), static_cast<uint32_t>(at + length)});
      at += length;
    }
    if (at == text.size()) break;
    const size_t bad = invalid_utf8_length(text.substr(at));
    out.append("\xEF\xBF\xBD", {static_cast<uint32_t>(at), static_cast<uint32_t>(at + bad)});
    at += bad;
  }
}

}  // namespace

struct Tokenizer::TokenizerData {
  // `named` are the added tokens of tokenizer_config.json.
  TokenizerData(TokenizerFile file, const std::vector<AddedToken>& named) : TokenizerData(file, file.root(), named) {}
  TokenizerData(TokenizerFile& file, const JsonReader& root, const std::vector<AddedToken>& named)
      : normalizer(root.find("normalizer")),
        pre_tokenizer(root.find("pre_tokenizer")),
        post_processor(root.find("post_processor")),
        decoder(root.find("decoder")),
        model(checked_bpe(file), pre_tokenizer.byte_level()),
        added(root, named, model.vocab(), normalizer) {
    fill_tokens();
    char_table();
    track_always = pre_tokenizer.needs_origins() && !normalizer.empty();
  }

  void fill_tokens();
  void apply_config(const JsonReader& config);
  void warn_of_ignored_keys(const JsonReader& config) const;
  void encode(std::string_view text, const EncodeOptions& options, std::vector<TokenId>& ids, Offsets* offsets) const;
  std::optional<TokenId> find(std::string_view token) const;
  // A combination of kExists, kSpecial and kAdded; 0 for an id that has no token.
  uint8_t flags_of(TokenId id) const {
    const auto index = static_cast<size_t>(id);  // a negative id becomes a huge index
    return index < token_flags.size() ? token_flags[index] : uint8_t{0};
  }
  std::optional<TokenId> token_from_config(const JsonReader& config, const char* key) const;

  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  PostProcessor post_processor;
  Decoder decoder;
  BpeModel model;
  AddedTokens added;
  std::vector<std::string> tokens;   // by id
  std::vector<uint8_t> token_flags;  // by id: kExists, kSpecial and kAdded
  std::optional<TokenId> bos, eos, pad;
  bool track_always = false;
  mutable ScratchPool scratch_pool;

 private:
  // One encode call. The text passes through five steps, each on smaller parts: raw added tokens are cut out, the rest
  // is normalized, normalized added tokens are cut out, the rest is pre-tokenized, and the BPE model encodes each
  // piece. `origins` has the input byte range of each byte of the current text, and is null when nothing needs offsets.
  class EncodeCall {
   public:
    EncodeCall(const TokenizerData& state, EncodeScratch& scratch, const EncodeOptions& options,
               std::vector<TokenId>& ids, Offsets* offsets)
        : state_(state), scratch_(scratch), options_(options), ids_(ids), offsets_(offsets) {}
    void encode_text(std::string_view text);

   private:
    using Encode = void (EncodeCall::*)(std::string_view text, const Span* origins, bool at_start);
    void part(std::string_view text, const Span* origins, bool at_start);
    void normalized_part(std::string_view text, const Span* origins, bool at_start);
    // Appends the ids of the added tokens that the matcher finds, and calls `encode` for the text between them.
    // `at_start`: the text begins where the input begins.
    void split_added_tokens(const AddedMatcher& matcher, std::vector<TextSegment>& parts, std::string_view text,
                            const Span* origins, bool at_start, Encode encode);
    void token(TokenId id, Span part, const Span* origins);

    const TokenizerData& state_;
    EncodeScratch& scratch_;
    const EncodeOptions& options_;
    std::vector<TokenId>& ids_;
    Offsets* offsets_;
  };
};

// Fills `tokens` and `token_flags`, which are indexed by token id. Added tokens are written last, because an added
// token replaces a vocabulary token that has the same id.
void Tokenizer::TokenizerData::fill_tokens() {
  TokenId largest = -1;
  for (const auto& [token, id] : model.vocab().tokens()) largest = std::max(largest, id);
  for (const auto& [token, id] : added.ids()) largest = std::max(largest, id);
  tokens.resize(static_cast<size_t>(largest) + 1);
  token_flags.resize(tokens.size());
  const auto set = [&](const std::string& token, TokenId id) {
    tokens[static_cast<size_t>(id)] = token;
    token_flags[static_cast<size_t>(id)] = static_cast<uint8_t>(kExists | (added.is_special(token) ? kSpecial : 0) |
                                                                (added.ids().contains(token) ? kAdded : 0));
  };
  for (const auto& [token, id] : model.vocab().tokens()) set(token, id);
  for (const auto& [id, token] : added.strings()) set(token, id);
}

std::optional<TokenId> Tokenizer::TokenizerData::find(std::string_view token) const {
  if (const auto found = added.ids().find(std::string(token)); found != added.ids().end()) return found->second;
  const int32_t id = model.vocab().find(token);
  return id == TokenTable::kNone ? std::nullopt : std::optional<TokenId>(id);
}

std::optional<TokenId> Tokenizer::TokenizerData::token_from_config(const JsonReader& config, const char* key) const {
  if (!config.has(key)) return std::nullopt;
  const JsonReader node = config.at(key);
  return find(node.is_object() ? node.string("content") : node.as_string());
}

void Tokenizer::TokenizerData::apply_config(const JsonReader& config) {
  bos = token_from_config(config, "bos_token");
  eos = token_from_config(config, "eos_token");
  pad = token_from_config(config, "pad_token");
  warn_of_ignored_keys(config);
}

// Logs a warning if tokenizer.json adds other special tokens around a text than the keys add_bos_token and
// add_eos_token of `config` ask for. transformers before version 5 built the post-processor of some tokenizer classes
// from these keys; version 5 ignores the keys.
void Tokenizer::TokenizerData::warn_of_ignored_keys(const JsonReader& config) const {
  if (!config.has("add_bos_token") && !config.has("add_eos_token")) return;
  const bool wants_bos = config.boolean("add_bos_token", false) && bos;
  const bool wants_eos = config.boolean("add_eos_token", false) && eos;
  constexpr TokenId kText = -1;
  std::vector<TokenId> found = {kText}, wanted = {kText};
  const std::string text_name = "TEXT";
  const auto name_of = [&](TokenId id) -> const std::string& {
    const auto index = static_cast<size_t>(id);
    return id >= 0 && index < tokens.size() ? tokens[index] : text_name;
  };
  post_processor.apply(/*add_special_tokens=*/true, "", found, nullptr, name_of);
  if (wants_bos) wanted.insert(wanted.begin(), *bos);
  if (wants_eos) wanted.push_back(*eos);
  if (found == wanted) return;
  const auto spelled = [&](const std::vector<TokenId>& ids) {
    std::string line;
    for (const TokenId id : ids) line += (line.empty() ? "" : " ") + escape(name_of(id), kShownTokenBytes);
    return line;
  };
  log_warning_once(
      "{}: add_bos_token and add_eos_token are ignored, as in transformers 5: a text becomes '{}' by tokenizer.json, "
      "not '{}'. If the model was trained with the second form, change post_processor in tokenizer.json.",
      config.name(), spelled(found), spelled(wanted));
}

// The origin of a byte of the text is the range of input bytes from which it was made. Origins are computed only if
// something reads them: the offsets that the caller asked for, EncodeOptions::barriers, or a pre-tokenizer that needs
// the input position of its pieces behind a normalizer. If they are not needed and the text is valid UTF-8, the text is
// used without a copy.
void Tokenizer::TokenizerData::EncodeCall::encode_text(std::string_view text) {
  AlignedText& input = scratch_.input;
  const bool track = offsets_ || state_.track_always || !options_.barriers.empty();
  const bool valid = is_valid_utf8(text);
  input.clear();
  if (!valid || track) {
    make_valid(text, track, input);
    text = input.text;
  }
  split_added_tokens(state_.added.raw(), scratch_.raw_parts, text, track ? input.origins.data() : nullptr, true,
                     &EncodeCall::part);
}

void Tokenizer::TokenizerData::EncodeCall::split_added_tokens(const AddedMatcher& matcher,
                                                              std::vector<TextSegment>& parts, std::string_view text,
                                                              const Span* origins, bool at_start, Encode encode) {
  if (matcher.empty()) return (this->*encode)(text, origins, at_start);
  matcher.split(text, {options_.parse_special, options_.barriers, origins}, parts);
  for (const auto& [span, id] : parts) {
    if (id != TextSegment::kText) {
      token(id, span, origins);
    } else {
      (this->*encode)(text.substr(span.begin, span.end - span.begin), origins ? origins + span.begin : nullptr,
                      at_start && span.begin == 0);
    }
  }
}

// Normalizes a part of the text that is between tokens of AddedTokens::raw(), which are cut out before. Then cuts out
// the tokens of AddedTokens::normalized(). `origins` has the input range of each byte of `text`. Normalization may
// change the length of the text, so afterwards `text` and `origins` refer to the normalized text and to the array of
// input ranges of that text.
void Tokenizer::TokenizerData::EncodeCall::part(std::string_view text, const Span* origins, bool at_start) {
  if (!state_.normalizer.empty()) {
    AlignedText& normalized = scratch_.normalized;
    normalized.text = text;
    normalized.tracked = origins != nullptr;
    if (origins) normalized.origins.assign(origins, origins + text.size());
    state_.normalizer.apply(normalized, scratch_.normalize);
    text = normalized.text;
    if (origins) origins = normalized.origins.data();
  }
  split_added_tokens(state_.added.normalized(), scratch_.normalized_parts, text, origins, at_start,
                     &EncodeCall::normalized_part);
}

// Splits normalized text into pieces and encodes each of them. Without offsets, BpeModel::encode() uses the word cache.
// For offsets, BpeModel::encode_symbols() gives the length of each token.
void Tokenizer::TokenizerData::EncodeCall::normalized_part(std::string_view text, const Span* origins, bool at_start) {
  PreTokens& tokens = scratch_.tokens;
  tokens.start(text, origins, at_start);
  state_.pre_tokenizer.apply(tokens);
  for (const Span piece : tokens.pieces) {
    if (!offsets_) {
      state_.model.encode(tokens.piece(piece), tokens.text.size() - piece.begin, scratch_.bpe, ids_);
      continue;
    }
    state_.model.encode_symbols(tokens.piece(piece), scratch_.bpe);
    // Symbols cover the bytes of the piece in order, except for the bytes in `dropped_bytes`, which no symbol covers.
    // next_kept() skips dropped bytes and returns the next covered byte.
    uint32_t at = piece.begin;
    auto dropped = scratch_.bpe.dropped_bytes.begin();
    const auto next_kept = [&] {
      for (; dropped != scratch_.bpe.dropped_bytes.end() && piece.begin + *dropped == at; ++dropped) ++at;
      return at++;
    };
    for (const BpeSymbol symbol : scratch_.bpe.symbols) {
      const uint32_t first = next_kept();
      for (uint32_t byte = 1; byte < symbol.bytes; ++byte) next_kept();
      token(symbol.id, {first, at}, tokens.origins);
    }
  }
}

void Tokenizer::TokenizerData::EncodeCall::token(TokenId id, Span part, const Span* origins) {
  ids_.push_back(id);
  if (offsets_) offsets_->emplace_back(origins[part.begin].begin, origins[part.end - 1].end);
}

void Tokenizer::TokenizerData::encode(std::string_view text, const EncodeOptions& options, std::vector<TokenId>& ids,
                                      Offsets* offsets) const {
  check_text_size(text.size());
  const auto scratch = scratch_pool.acquire();
  ids.reserve(text.size() / 4 + 16);
  EncodeCall(*this, *scratch, options, ids, offsets).encode_text(text);
  post_processor.apply(options.add_special_tokens, text, ids, offsets, [&](TokenId id) -> const std::string& {
    static const std::string none;
    const auto index = static_cast<size_t>(id);
    return index < tokens.size() ? tokens[index] : none;
  });
}

Tokenizer::Tokenizer(std::shared_ptr<const TokenizerData> state) : state_(std::move(state)) {}

namespace {

// Checks that `dir` has a tokenizer.json; Error kIo if not. The message then names the tokenizer file of another
// format, if `dir` has one.
void check_tokenizer_is_there(const std::filesystem::path& dir) {
  if (std::filesystem::exists(dir / "tokenizer.json")) return;
  for (const char* other : {"tekken.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt"}) {
    TESSERA_CHECK(!std::filesystem::exists(dir / other), ErrorKind::kIo,
                  "[text.tokenizer] {}: holds {} but no tokenizer.json, the only format that is read. Convert it once "
                  "in Python: transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), or take "
                  "tokenizer.json from a copy of the model on the Hub that has one.",
                  dir.string(), other);
  }
  raise(ErrorKind::kIo,
        "[text.tokenizer] {}: holds no tokenizer.json. Fetch it from the model's page on the Hub, or copy it from the "
        "model that this one was made of.",
        dir.string());
}

// Copies from special_tokens_map.json (`map`) to tokenizer_config.json (`config`) the tokens under keys other than
// special_token_keys(). Like transformers, it does so only where the config has no added_tokens_decoder, and copies a
// list of additional tokens only where the config has no such list.
void copy_extra_tokens(const Json& map, Json& config) {
  if (config.contains("added_tokens_decoder")) return;
  const auto standard = special_token_keys();
  const bool has_list = config.contains("extra_special_tokens") || config.contains("additional_special_tokens");
  for (const auto& [key, value] : map.items()) {
    const bool is_list = key == "extra_special_tokens" || key == "additional_special_tokens";
    const bool is_named = key.ends_with("_token") && std::ranges::find(standard, key) == standard.end();
    if (is_named || (is_list && !has_list)) config[key] = value;
  }
}

// The content of tokenizer_config.json, with the special tokens that special_tokens_of() selects from this file and
// special_tokens_map.json.
Json config_of_tokenizer(const std::filesystem::path& dir, const std::string& where) {
  Json config = read_optional_json_object(dir / "tokenizer_config.json", where, /*max_keys=*/4'000'000);
  const Json map = read_special_tokens_map(dir);
  if (map.empty()) return config;
  copy_extra_tokens(map, config);
  const Json special_tokens = special_tokens_of(map, config);
  for (const auto& [name, text] : special_tokens.items()) {
    const auto found = config.find(name);
    const bool is_object = found != config.end() && found->is_object();  // an object has flags, which are kept
    if (!is_object || found->value("content", Json()) != text) config[name] = text;
  }
  return config;
}

}  // namespace

Tokenizer Tokenizer::from_folder(const std::filesystem::path& dir) {
  const auto path = dir / "tokenizer.json";
  check_tokenizer_is_there(dir);
  auto file = parse_tokenizer_file(read_file(path, kMaxFileBytes), path.string());
  const auto where = "[text.load] " + (dir / "tokenizer_config.json").string();
  const Json json = config_of_tokenizer(dir, where);
  const JsonReader config(json, where);
  const auto named = read_config_tokens(config, file.root());
  auto state = std::make_shared<TokenizerData>(std::move(file), named);
  state->apply_config(config);
  return Tokenizer(std::move(state));
}

Tokenizer Tokenizer::from_json(std::string_view json, std::string name) {
  return Tokenizer(
      std::make_shared<TokenizerData>(parse_tokenizer_file(json, std::move(name)), std::vector<AddedToken>()));
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::vector<TokenId> ids;
  state_->encode(text, options, ids, nullptr);
  return ids;
}

Encoding Tokenizer::encode_with_offsets(std::string_view text, const EncodeOptions& options) const {
  Encoding encoding;
  state_->encode(text, options, encoding.ids, &encoding.offsets);
  return encoding;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special_tokens) const {
  std::vector<std::string> tokens;
  tokens.reserve(ids.size());
  for (const TokenId id : ids) {
    const auto flags = state_->flags_of(id);
    const bool skipped = skip_special_tokens && (flags & kSpecial);
    if (flags && !skipped) tokens.push_back(state_->tokens[static_cast<size_t>(id)]);
  }
  return state_->decoder.decode(std::move(tokens));
}

std::string Tokenizer::token_bytes(TokenId id) const {
  return is_known(id) ? state_->decoder.bytes_of(state_->tokens[static_cast<size_t>(id)]) : "";
}

std::optional<TokenId> Tokenizer::token_to_id(std::string_view token) const { return state_->find(token); }

const std::string& Tokenizer::id_to_token(TokenId id) const {
  TESSERA_CHECK(is_known(id), ErrorKind::kConfig, "[text.id_to_token] id {} names no token, ids are below {}", id,
                state_->tokens.size());
  return state_->tokens[static_cast<size_t>(id)];
}

bool Tokenizer::is_known(TokenId id) const { return state_->flags_of(id) != 0; }
bool Tokenizer::is_special(TokenId id) const { return (state_->flags_of(id) & kSpecial) != 0; }
bool Tokenizer::is_added(TokenId id) const { return (state_->flags_of(id) & kAdded) != 0; }

size_t Tokenizer::vocab_size() const { return state_->tokens.size(); }
std::optional<TokenId> Tokenizer::bos_id() const { return state_->bos; }
std::optional<TokenId> Tokenizer::eos_id() const { return state_->eos; }
std::optional<TokenId> Tokenizer::pad_id() const { return state_->pad; }

std::vector<std::pair<size_t, size_t>> Tokenizer::special_tokens_in(std::string_view text) const {
  return state_->added.special_token_matcher().find_all(text);
}

std::vector<std::pair<size_t, size_t>> Tokenizer::added_tokens_in(std::string_view text) const {
  return state_->added.all_token_matcher().find_all(text);
}

}  // namespace tessera::text
