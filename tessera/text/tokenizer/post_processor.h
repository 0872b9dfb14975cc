// The post-processors of tokenizer.json, which add special tokens around the ids: TemplateProcessing (for single
// texts), ByteLevel (trims offsets), Sequence.
//
//   PostProcessor post(file.root().find("post_processor"));
//   post.apply(add_special_tokens, text, ids, &offsets, token_of);
//
// Immutable, thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/text/tokenizer/tokenizer_file.h"

namespace tessera::text {

using Offsets = std::vector<std::pair<size_t, size_t>>;

class PostProcessor {
 public:
  explicit PostProcessor(const std::optional<JsonReader>& node);  // nullopt: no stages

  // Adds the special tokens to `ids` if add_special_tokens is true, and an empty range for each of them to `offsets`.
  // ByteLevel with trim_offsets removes spaces from the ranges in `offsets`. `offsets` may be null. `text` is the input
  // of the encode call; `token_of` returns the string of an id.
  void apply(bool add_special_tokens, std::string_view text, std::vector<int32_t>& ids, Offsets* offsets,
             const std::function<const std::string&(int32_t)>& token_of) const;

 private:
  struct Stage {
    bool trims = false;  // true: ByteLevel with trim_offsets; false: TemplateProcessing
    bool add_prefix_space = false;
    std::vector<int32_t> before, after;  // ids that TemplateProcessing adds in front of the text and after the text
  };
  void add(const JsonReader& node);
  static Stage read_template(const JsonReader& node);
  std::vector<Stage> stages_;
};

}  // namespace tessera::text
