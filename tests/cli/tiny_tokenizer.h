// A tokenizer.json of single characters, for tests that need any tokenizer.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tessera::testing {

// A byte-pair tokenizer without merges. Each character is a token, and its id is its position in `characters`.
inline std::string character_tokenizer(const std::string& characters) {
  nlohmann::json vocabulary;
  for (size_t i = 0; i < characters.size(); ++i) vocabulary[std::string(1, characters[i])] = i;
  const nlohmann::json none;
  const nlohmann::json model = {{"type", "BPE"},
                                {"dropout", none},
                                {"unk_token", none},
                                {"continuing_subword_prefix", none},
                                {"end_of_word_suffix", none},
                                {"fuse_unk", false},
                                {"byte_fallback", false},
                                {"vocab", vocabulary},
                                {"merges", nlohmann::json::array()}};
  return nlohmann::json({{"version", "1.0"},
                         {"truncation", none},
                         {"padding", none},
                         {"added_tokens", nlohmann::json::array()},
                         {"normalizer", none},
                         {"pre_tokenizer", none},
                         {"post_processor", none},
                         {"decoder", {{"type", "Fuse"}}},
                         {"model", model}})
      .dump();
}

}  // namespace tessera::testing
