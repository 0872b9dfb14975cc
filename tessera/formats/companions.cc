#include "tessera/formats/companions.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/folder_links.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

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
constexpr const char* kTemplateFolder = "additional_chat_templates";

// Matches LICENSE, LICENSE.txt, NOTICE, USE_POLICY.md and similar names.
bool is_legal_text(const std::string& name) {
  constexpr std::array<std::string_view, 5> kBeginnings = {"license", "licence", "notice", "use_policy", "copying"};
  std::string lower = name;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  return std::ranges::any_of(kBeginnings, [&](std::string_view beginning) { return lower.starts_with(beginning); });
}

// Returns the sorted names of the files directly in `folder` for which `is_wanted` is true. The folder comes from an
// untrusted source, so number and size are limited: at most 100 files of up to 1 MiB each; other files are skipped.
template <class Wanted>
std::vector<fs::path> small_files(const fs::path& folder, const Wanted& is_wanted) {
  constexpr size_t kMostFiles = 100;
  constexpr uintmax_t kMostBytes = 1 << 20;
  std::vector<fs::path> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const auto name = entry.path().filename();
    std::error_code ignored;
    const bool fits = entry.is_regular_file(ignored) && entry.file_size(ignored) <= kMostBytes;
    if (fits && is_wanted(name.string()) && names.size() < kMostFiles) names.push_back(name);
  }
  std::ranges::sort(names);
  return names;
}

// Copies from/name to to/name. A missing file is skipped; a link out of `from` is skipped with a warning.
void copy_file_of(const fs::path& from, const fs::path& to, const fs::path& name) {
  std::error_code ignored;
  if (!fs::is_regular_file(from / name, ignored)) return;
  const auto place = resolve_links(from, name);
  if (place.is_inside) {
    fs::create_directories((to / name).parent_path());
    return publish_file(to / name, read_file(place.real));
  }
  log_warning(
      "[formats.copy] {}: is a link to {}, outside the model's folder, and is left out of {}. If it belongs to the "
      "model, put a copy in its place.",
      escape((from / name).string()), quote(place.real.string()), to.string());
}

}  // namespace

void copy_companions(const fs::path& from, const fs::path& to) {
  for (const char* name : kCompanions) copy_file_of(from, to, name);
  for (const auto& name : small_files(from, is_legal_text)) copy_file_of(from, to, name);
  const auto templates =
      small_files(from / kTemplateFolder, [](const std::string& name) { return name.ends_with(".jinja"); });
  for (const auto& name : templates) copy_file_of(from, to, kTemplateFolder / name);
}

void copy_config_and_companions(const fs::path& from, const fs::path& to) {
  std::error_code ignored;
  if (fs::is_regular_file(from / "config.json", ignored)) {
    const auto place = resolve_links(from, "config.json");
    TESSERA_CHECK(place.is_inside, ErrorKind::kFormat,
                  "[formats.copy] {}: is a link to {}, outside the model's folder. Put a copy in its place.",
                  (from / "config.json").string(), quote(place.real.string()));
    publish_file(to / "config.json", read_file(place.real));
  }
  copy_companions(from, to);
}

}  // namespace tessera
