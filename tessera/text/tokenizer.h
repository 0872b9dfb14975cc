// Converts text to token ids and back, with the tokenizer.json of a Hugging Face model folder.
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
// Mistral and SmolLM files use. A file that needs any other component raises Error kFormat, which names the component.
// Bytes that are not valid UTF-8 are read as U+FFFD. Offsets differ from the package in one case: a character that is
// not in the vocabulary, in a file without an unknown token. The package then shifts the offsets of the later tokens of
// this word to the left; here offsets always point at the text of the token.
//
// A Tokenizer is immutable: every const method may be called from many threads at once. Copies share the same data.
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
  bool add_special_tokens = true;  // add the tokens of the post-processor, e.g. BOS
  bool parse_special = true;       // "<|im_end|>" in the text becomes the special token; if false, it is plain text
  // Barriers: byte positions in the text, in ascending order. No added token may span a barrier: text that would be an
  // added token with a barrier between two of its bytes stays plain text.
  std::span<const size_t> barriers{};
};

struct Encoding {
  std::vector<TokenId> ids;
  // The half-open byte range of the input for each id; {0, 0} for a token that the post-processor added. A token that
  // covers only some bytes of a character has the range of the whole character.
  std::vector<std::pair<size_t, size_t>> offsets;
};

class Tokenizer {
 public:
  // Reads DIR/tokenizer.json, and where they exist DIR/tokenizer_config.json and DIR/special_tokens_map.json. The two
  // optional files give the bos, eos and pad token and say which tokens are special, as transformers 5 reads them. A
  // token that only these two files name gets the next free id; the model may have no embedding row for this id
  // (embedding_rows.h). Like transformers 5, the tokenizer ignores the keys "add_bos_token" and "add_eos_token", and
  // logs a warning when these keys would change the tokens of a text. Error kIo when the folder has no tokenizer.json;
  // kFormat for a file with wrong content.
  static Tokenizer from_folder(const std::filesystem::path& dir);
  // `json` is the content of a tokenizer.json; error messages use `name` as the name of the file.
  static Tokenizer from_json(std::string_view json, std::string name);

  // Converts `text` to ids. Error kConfig for a text of about 4 GiB or more; kFormat when a regular expression of
  // tokenizer.json needs too many steps for this text.
  std::vector<TokenId> encode(std::string_view text, const EncodeOptions& options = {}) const;
  Encoding encode_with_offsets(std::string_view text, const EncodeOptions& options = {}) const;
  // Returns the text of `ids`. Ids that have no token are skipped, and so are special tokens if `skip_special_tokens`
  // is true. The result is valid UTF-8.
  std::string decode(std::span<const TokenId> ids, bool skip_special_tokens = true) const;

  // The bytes that a token adds in the middle of a text; they may be only a part of a character. For a special token
  // the result is its name, e.g. "<|im_end|>". Empty for an id that has no token.
  std::string token_bytes(TokenId id) const;

  // The id of the token with exactly this string; nullopt when there is none.
  std::optional<TokenId> token_to_id(std::string_view token) const;
  // Returns the string of the token with this id. Error kConfig for an id that has no token.
  const std::string& id_to_token(TokenId id) const;
  bool is_known(TokenId id) const;  // the id has a token
  // The largest id + 1, with added tokens: the number of rows that an embedding of all tokens has. The embedding of a
  // model may have fewer rows.
  size_t vocab_size() const;
  // The ids of the tokens that tokenizer_config.json or special_tokens_map.json names as bos_token, eos_token and
  // pad_token; nullopt where neither file names a token that the tokenizer has.
  std::optional<TokenId> bos_id() const;
  std::optional<TokenId> eos_id() const;
  std::optional<TokenId> pad_id() const;
  bool is_special(TokenId id) const;
  // Added tokens are found in the text as whole strings, before the text is split into words. All special tokens are
  // added tokens.
  bool is_added(TokenId id) const;
  // The half-open byte ranges at which `text` contains the string of a special token. Ranges may overlap.
  std::vector<std::pair<size_t, size_t>> special_tokens_in(std::string_view text) const;
  // The half-open byte ranges at which `text` contains the string of an added token, with the longest one at each
  // position. Added tokens that are not special, such as Qwen's <tool_call>, are included.
  std::vector<std::pair<size_t, size_t>> added_tokens_in(std::string_view text) const;

 private:
  struct TokenizerData;
  explicit Tokenizer(std::shared_ptr<const TokenizerData> state);
  std::shared_ptr<const TokenizerData> state_;
};

// Decodes one token at a time. For well-formed text the returned pieces, joined, equal decode() of all ids. Each piece
// is complete UTF-8: a character whose bytes come from several tokens is returned with the last of these tokens. Not
// thread-safe; keeps a copy of the tokenizer.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, bool skip_special_tokens = true);
  // Adds a token and returns the text that is complete with this token and has not been returned before; it may be
  // empty.
  std::string push(TokenId id);
  // Returns the text that push() has held back so far, e.g. an incomplete character as U+FFFD, and resets the decoder.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  bool skip_special_tokens_;
  std::vector<TokenId> window_;  // the ids of the last returned piece, then the ids whose text is held back
  size_t context_ = 0;           // number of ids in window_ whose text has been returned; they come first
  size_t emitted_bytes_ = 0;     // bytes of decode(window_) that have been returned
};

}  // namespace tessera::text
