// The tokenizer inside a GGUF file as Hugging Face files, and back.
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

// Token types as GGUF numbers them.
enum GgufTokenType : int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

// How one family of byte-level tokenizers cuts text before the merges.
struct PreTokenizerKind {
  std::vector<std::string_view> gguf_names;     // tokenizer.ggml.pre; the first is the one that is written
  std::vector<std::string_view> split_regexes;  // each cuts the parts that those before it left
  bool digits = false;                          // each digit alone
  bool byte_level_regex = false;                // the GPT-2 expression inside the ByteLevel step
  bool nfc = false;
  bool ignore_merges = false;
  bool add_bos = false;  // llama.cpp's default where the file does not say
};
const std::vector<PreTokenizerKind>& pre_tokenizer_kinds();

// The name of llama.cpp's pre-tokenizer for files that name none.
inline constexpr std::string_view kDefaultPreTokenizer = "default";

// Whether llama.cpp takes a token of this text for the end of a text, whatever the keys of the file say.
bool is_known_end(std::string_view token);
// The tokens at which texts of the file end, each once: "tokenizer.ggml.eos_token_id", "eot_token_id" and
// "eom_token_id", then known ends of the vocabulary. Ids of `vocab` and above are left out.
std::vector<uint64_t> gguf_end_tokens(const GgufFile& file, int64_t vocab);

// tokenizer.json, tokenizer_config.json and special_tokens_map.json into a folder. Error kFormat for a tokenizer that
// contradicts itself or has more tokens than vocab rows, kConfig for a kind that is not converted.
void write_tokenizer_files(const GgufFile& file, const std::filesystem::path& dir, int64_t vocab, int64_t context);

// The tokenizer.* keys from a Hugging Face folder, filled up to config.vocab_size tokens. Of the tokens at which its
// texts end (end_tokens.h) the tokenizer's goes into eos_token_id, others into eot_token_id and eom_token_id. A warning
// names those for which no key is left and that llama.cpp does not know by their text. Of a folder that lists
// no eos_token_id, an end that is ordinary text to the tokenizer is left out.
void set_tokenizer_keys(const std::filesystem::path& dir, const ModelConfig& config, GgufWriter& writer);

// JSON text for a file; Error kFormat when a string is no UTF-8.
std::string json_text(const nlohmann::ordered_json& json, const std::string& where, int indent);
// An object from a JSON file, Error kFormat otherwise.
nlohmann::ordered_json read_json_object(const std::filesystem::path& path);

}  // namespace tessera
