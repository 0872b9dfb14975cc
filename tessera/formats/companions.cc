#include "tessera/formats/companions.h"

#include "tessera/base/file.h"

namespace tessera {
namespace {

constexpr const char* kCompanions[] = {"generation_config.json",
                                       "tokenizer.json",
                                       "tokenizer_config.json",
                                       "special_tokens_map.json",
                                       "added_tokens.json",
                                       "vocab.json",
                                       "merges.txt",
                                       "tokenizer.model",
                                       "chat_template.jinja",
                                       "chat_template.json",
                                       "preprocessor_config.json",
                                       "processor_config.json"};

void copy_file_of(const std::filesystem::path& from, const std::filesystem::path& to, const char* name) {
  if (std::filesystem::is_regular_file(from / name)) publish_file(to / name, read_file(from / name));
}

}  // namespace

void copy_companions(const std::filesystem::path& from, const std::filesystem::path& to) {
  for (const char* name : kCompanions) copy_file_of(from, to, name);
}

void copy_config_and_companions(const std::filesystem::path& from, const std::filesystem::path& to) {
  copy_file_of(from, to, "config.json");
  copy_companions(from, to);
}

}  // namespace tessera
