// Text to token ids and back, from the tokenizer.json of a Hugging Face model folder.
//
//   const auto tokenizer = Tokenizer::from_folder("SmolLM2-135M-Instruct");
//   std::vector<TokenId> ids = tokenizer.encode("Hello world");
//   std::string text = tokenizer.decode(ids);
//
//   StreamDecoder stream(tokenizer);                    // while generating
//   for (TokenId id : generated) std::cout << stream.push(id);
//   std::cout << stream.finish();
//
// Ids, offsets and decoded text are those of the Python package `tokenizers`: BPE models, byte-level and
// SentencePiece-style, with the normalizers, pre-tokenizers, post-processors and decoders that Llama, Qwen, Gemma,
// Mistral and SmolLM files use. A file that asks for anything else is Error kFormat that names it. Bytes that are no
// UTF-8 count as U+FFFD. One thing differs: of a character that the vocabulary lacks and no unknown token stands for,
// the package moves the offsets of the tokens behind it in its word to the left; here they are those of the tokens'
// text.
//
// A Tokenizer is immutable: every const method may be called from many threads at once. Copies share one state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::text {

using TokenId = int32_t;

struct EncodeOptions {
  bool add_special_tokens = true;      // what the post-processor adds, e.g. BOS
  bool parse_special = true;           // "<|im_end|>" inside the text becomes the special token, else plain text
  std::span<const size_t> barriers{};  // places in the text, rising, over which no added token reaches
};

struct Encoding {
  std::vector<TokenId> ids;
  // Half-open byte range of the input for each id; {0, 0} for tokens the post-processor added. A token that holds part
  // of a character has the range of the whole character.
  std::vector<std::pair<size_t, size_t>> offsets;
};

class Tokenizer {
 public:
  // DIR/tokenizer.json, and DIR/tokenizer_config.json and special_tokens_map.json where they are there: bos, eos and
  // pad token, and which tokens are special, as transformers 5 reads them. Tokens that these files name and
  // tokenizer.json lacks get the next free ids; the model may have no rows for them (token_rows.h). Like transformers,
  // the tokenizer ignores "add_bos_token" and "add_eos_token" beside the first file, with a warning where texts get
  // other tokens for it.
  static Tokenizer from_folder(const std::filesystem::path& dir);
  // `name` stands for the file in error messages.
  static Tokenizer from_json(std::string_view json, std::string name);

  std::vector<TokenId> encode(std::string_view text, const EncodeOptions& options = {}) const;
  Encoding encode_with_offsets(std::string_view text, const EncodeOptions& options = {}) const;
  // Ids that name no token are skipped. The result is valid UTF-8.
  std::string decode(std::span<const TokenId> ids, bool skip_special_tokens = true) const;

  // The bytes that a token adds inside a text, which may be part of a character; of a special token its name. Empty for
  // ids that name no token.
  std::string token_bytes(TokenId id) const;

  std::optional<TokenId> token_to_id(std::string_view token) const;
  // Error kConfig for an id that names no token.
  const std::string& id_to_token(TokenId id) const;
  bool is_known(TokenId id) const;  // names a token
  // Largest id + 1, added tokens included: the rows an embedding needs for all of them. It may have fewer.
  size_t vocab_size() const;
  std::optional<TokenId> bos_id() const;
  std::optional<TokenId> eos_id() const;
  std::optional<TokenId> pad_id() const;
  bool is_special(TokenId id) const;
  // Found in a text as a whole, before it is cut into words. Special tokens are such tokens.
  bool is_added(TokenId id) const;
  // Where a special token is written in a text, overlapping ones too: half-open byte ranges.
  std::vector<std::pair<size_t, size_t>> special_tokens_in(std::string_view text) const;
  // Likewise of all added tokens, the longest at each place: those too that are not called special (<tool_call>).
  std::vector<std::pair<size_t, size_t>> added_tokens_in(std::string_view text) const;

 private:
  struct State;
  explicit Tokenizer(std::shared_ptr<const State> state);
  std::shared_ptr<const State> state_;
};

// Decodes one token at a time. The pieces, joined, are what decode() gives for all ids of well-formed text; each piece
// is complete UTF-8, so a character whose bytes are spread over several tokens comes with the last of them. Not
// thread-safe; keeps a copy of the tokenizer.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, bool skip_special_tokens = true);
  std::string push(TokenId id);
  // What is still held back, e.g. an incomplete character as U+FFFD. The decoder is then as new.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  bool skip_special_tokens_;
  std::vector<TokenId> window_;  // ids from the last clean cut on; the first `context_` of them are already emitted
  size_t context_ = 0;
  size_t emitted_bytes_ = 0;  // of decode(window_)
};

}  // namespace tessera::text
