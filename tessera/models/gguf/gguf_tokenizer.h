// Converts the tokenizer in a GGUF file to Hugging Face files, and back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {
class GgufFile;
class GgufWriter;
struct ModelConfig;
}  // namespace tessera

namespace tessera {

// Token types with GGUF's numbers.
enum GgufTokenType : int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

// How one kind of byte-level tokenizer splits text before BPE merges. GGUF files name the kind in the key
// tokenizer.ggml.pre.
struct PreTokenizerKind {
  std::vector<std::string_view> gguf_names;     // values of tokenizer.ggml.pre; the first is written
  std::vector<std::string_view> split_regexes;  // applied one after another; each splits the parts of the earlier ones
  bool digits = false;                          // each digit is split off
  bool byte_level_regex = false;                // the ByteLevel step uses the GPT-2 expression
  bool nfc = false;
  bool ignore_merges = false;
  bool add_bos = false;  // llama.cpp's default when the file has no such key
};
const std::vector<PreTokenizerKind>& pre_tokenizer_kinds();

// The pre-tokenizer that llama.cpp uses for files without the key tokenizer.ggml.pre.
inline constexpr std::string_view kDefaultPreTokenizer = "default";

// Whether llama.cpp treats a token with this text as an end of text, whatever the keys of the file are.
bool is_known_end(std::string_view token);
// Returns the tokens at which texts of the file end, each once: "tokenizer.ggml.eos_token_id", "eot_token_id" and
// "eom_token_id", then tokens of the vocabulary for which is_known_end() holds. Ids >= `vocab` are left out.
std::vector<uint64_t> gguf_end_tokens(const GgufFile& file, int64_t vocab);

// Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json to a folder. Errors: kFormat for a tokenizer
// that contradicts itself or has more tokens than `vocab` rows, kConfig for a kind that is not converted.
void write_tokenizer_files(const GgufFile& file, const std::filesystem::path& dir, int64_t vocab, int64_t context);

// Writes the tokenizer.* keys from a Hugging Face folder, with unused tokens added up to config.vocab_size. The
// tokenizer's end token is written to eos_token_id, and other end tokens (end_tokens.h) to eot_token_id and
// eom_token_id. A warning lists end tokens for which no key is left and that llama.cpp does not recognise by their
// text. When the folder lists no eos_token_id, an end token that is ordinary text to the tokenizer is left out.
void set_tokenizer_keys(const std::filesystem::path& dir, const ModelConfig& config, GgufWriter& writer);

// Formats JSON for a file. Error kFormat when a string is not UTF-8.
std::string json_text(const nlohmann::ordered_json& json, const std::string& where, int indent);
// Reads an object from a JSON file. Error kFormat for anything else.
nlohmann::ordered_json read_json_object(const std::filesystem::path& path);

}  // namespace tessera
