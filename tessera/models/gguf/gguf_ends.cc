// The tokens at which texts of a GGUF file end.
#include <algorithm>
#include <array>

#include "tessera/formats/gguf/gguf.h"
#include "tessera/models/gguf/gguf_tokenizer.h"

namespace tessera {

// llama.cpp's list (llama-vocab.cpp) without the texts that vocabularies have as tags of HTML or that always are the
// file's eos_token_id: </s>, <eos>.
bool is_known_end(std::string_view token) {
  static constexpr std::array<std::string_view, 18> kEnds = {
      "<|im_end|>",      "<|eot_id|>",
      "<|eom_id|>",      "<end_of_turn>",
      "<|end|>",         "<|endoftext|>",
      "<|end_of_text|>", "<end_of_utterance>",
      "<|return|>",      "<|call|>",
      "<|calls|>",       "<|flush|>",
      "<EOT>",           "_<EOT>",
      "[EOT]",           "[EOS]",
      "<turn|>",         "<\uff5cend\u2581of\u2581sentence\uff5c>"};
  return std::ranges::find(kEnds, token) != kEnds.end();
}

std::vector<uint64_t> gguf_end_tokens(const GgufFile& file, int64_t vocab) {
  std::vector<uint64_t> ends;
  const auto add = [&](uint64_t id) {
    const bool is_row = id < static_cast<uint64_t>(vocab);
    if (is_row && std::ranges::find(ends, id) == ends.end()) ends.push_back(id);
  };
  for (const char* key : {"eos", "eot", "eom"}) {
    if (const auto id = file.find_uint(std::string("tokenizer.ggml.") + key + "_token_id")) add(*id);
  }
  const auto* tokens = file.find_strings("tokenizer.ggml.tokens");
  for (size_t id = 0; tokens != nullptr && id < tokens->size(); ++id) {
    if (is_known_end((*tokens)[id])) add(id);
  }
  return ends;
}

}  // namespace tessera
