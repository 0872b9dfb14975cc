// A tokenizer whose token ids are the bytes of the text, with ChatML's two special tokens and an EOS. A test can
// therefore read the expected ids from the text.
#pragma once

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "tessera/text/tokenizer.h"

namespace tessera::data {

constexpr int32_t kTurnStart = 256;  // <|im_start|>
constexpr int32_t kTurnEnd = 257;    // <|im_end|>
constexpr int32_t kEos = 258;        // <eos>

// Writes tokenizer.json and tokenizer_config.json into the folder and reads them. The tokenizer is a byte-level BPE
// without merges, with 256 letters for the bytes in GPT-2's numbering.
inline text::Tokenizer make_byte_tokenizer(const std::filesystem::path& folder) {
  nlohmann::json vocab = nlohmann::json::object();
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    const int letter = printable ? byte : next++;
    std::string utf8;
    if (letter < 0x80) {
      utf8 = {static_cast<char>(letter)};
    } else {
      utf8 = {static_cast<char>(0xc0 | letter >> 6), static_cast<char>(0x80 | (letter & 0x3f))};
    }
    vocab[utf8] = byte;
  }
  auto added = nlohmann::json::array();
  for (const auto& [id, content] : {std::pair{kTurnStart, "<|im_start|>"}, {kTurnEnd, "<|im_end|>"}, {kEos, "<eos>"}}) {
    added.push_back({{"id", id},
                     {"content", content},
                     {"special", true},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false}});
  }
  const nlohmann::json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  const nlohmann::json json = {{"version", "1.0"},
                               {"truncation", nullptr},
                               {"padding", nullptr},
                               {"added_tokens", added},
                               {"normalizer", nullptr},
                               {"pre_tokenizer", byte_level},
                               {"post_processor", nullptr},
                               {"decoder", byte_level},
                               {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}}};
  std::ofstream(folder / "tokenizer.json") << json;
  std::ofstream(folder / "tokenizer_config.json") << R"({"eos_token": "<eos>"})";
  return text::Tokenizer::from_folder(folder);
}

}  // namespace tessera::data
