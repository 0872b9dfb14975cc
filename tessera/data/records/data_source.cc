#include "tessera/data/records/data_source.h"

#include <fmt/ranges.h>
#include <glob.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/text/number.h"
#include "tessera/base/text/quote.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostFiles = 100'000;
constexpr int kDeepest = 6;  // folders inside one another

// The words that name a split in the file and folder names of data sets on the Hugging Face Hub.
struct SplitWords {
  const char* split;
  std::array<const char*, 5> words;
};
constexpr SplitWords kSplits[] = {{"train", {"train", "training"}},
                                  {"validation", {"validation", "valid", "dev", "val"}},
                                  {"test", {"test", "testing", "eval", "evaluation"}}};

// The file name without a final .gz.
fs::path unpacked_name(const fs::path& path) { return path.extension() == ".gz" ? path.stem() : path.filename(); }

bool is_table(const fs::path& file) {
  const auto extension = unpacked_name(file).extension();
  return extension == ".csv" || extension == ".tsv";
}

// A hint for a path that looks like the name of a data set on the Hub (OWNER/NAME); else empty.
std::string hub_hint(const std::string& name) {
  const auto slash = name.find('/');
  const bool like_one = slash != name.npos && slash > 0 && slash + 1 < name.size() &&
                        name.find('/', slash + 1) == name.npos && name.find_first_of(". ") != 0;
  if (!like_one || fs::path(name).has_extension()) return "";
  return fmt::format(
      " If it is a data set of the Hub's: fetch it with 'hf download --repo-type dataset {}', and name the "
      "folder that this prints.",
      name);
}

// The name without its extensions, of e.g. train-00000-of-00002.parquet or part.jsonl.gz.
std::string stem_of(const fs::path& path) { return unpacked_name(path).stem().string(); }

bool is_data_name(const fs::path& path) {
  static const std::set<std::string> kNotData = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json",
                                                 "state.json"};
  if (kNotData.contains(path.filename().string()) || path.filename().string().starts_with('.')) return false;
  static const std::set<std::string> kData = {".jsonl", ".ndjson", ".json", ".txt", ".parquet", ".idx"};
  return kData.contains(unpacked_name(path).extension().string());
}

// NAME-00003-of-00010 is shard 3 of 10.
struct ShardName {
  std::string stem;
  size_t index = 0, count = 0;
};

std::optional<ShardName> shard_of(const std::string& stem) {
  const size_t of = stem.rfind("-of-");
  if (of == stem.npos) return std::nullopt;
  const size_t dash = stem.rfind('-', of - 1);
  constexpr size_t kMostDigits = 9;
  const auto number = [](const std::string& text) {
    return text.size() <= kMostDigits ? parse_number<size_t>(text) : std::nullopt;
  };
  if (of == 0 || dash == stem.npos) return std::nullopt;
  const auto index = number(stem.substr(dash + 1, of - dash - 1));
  const auto count = number(stem.substr(of + 4, stem.find('-', of + 4) - of - 4));
  if (!index || !count) return std::nullopt;
  return ShardName{stem.substr(0, dash), *index, *count};
}

void check_shards(const std::vector<DataFile>& files) {
  std::map<std::pair<std::string, size_t>, std::set<size_t>> found;  // indices by (folder and name, count)
  for (const auto& file : files) {
    const auto shard = shard_of(stem_of(file.path));
    if (shard) found[{(file.path.parent_path() / shard->stem).string(), shard->count}].insert(shard->index);
  }
  for (const auto& [name, indices] : found) {
    for (size_t i = 0; i < name.second && i <= indices.size(); ++i) {
      TESSERA_CHECK(indices.contains(i), ErrorKind::kFormat,
                    "[data.files] {}-{:05}-of-{:05}: this shard is missing, {} of {} are there. Fetch it.", name.first,
                    i, name.second, indices.size(), name.second);
    }
  }
}

// Whether `word` occurs in the text with no letter or digit next to it.
bool is_word_of(const std::string& text, std::string_view word) {
  const auto letter = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  for (size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !letter(text[at - 1])) && (end == text.size() || !letter(text[end]))) return true;
  }
  return false;
}

// kSplits lists for each split the words that name it in file and folder names. Calls `holds` for these words in order,
// and returns the split named by the first word for which `holds` returns true; null when there is no such word.
template <class Holds>
const char* split_where(Holds holds) {
  for (const auto& [split, words] : kSplits) {
    for (const char* word : words) {
      if (word && holds(word)) return split;
    }
  }
  return nullptr;
}

// Returns the split of a file: "train", "validation" or "test"; the NAME of a shard NAME-00000-of-00010 if NAME is none
// of the words in kSplits; or "" if no split is found. The name of the file is tested first, then the names of the
// folders above it, from the innermost to the outermost. The first name from which a split follows decides.
std::string split_of(const fs::path& path, const fs::path& root) {
  const auto shard = shard_of(stem_of(path));
  std::vector<std::string> names = {shard ? shard->stem : stem_of(path)};
  for (auto folder = path.parent_path(); folder != root && folder.has_filename(); folder = folder.parent_path()) {
    names.push_back(folder.filename().string());
  }
  for (const auto& name : names) {
    if (const char* split = split_where([&](const char* word) { return name == word; })) return split;
    if (&name == &names.front() && shard) return name;  // train_sft-00000-of-00003
    if (const char* split = split_where([&](const char* word) { return is_word_of(name, word); })) return split;
  }
  return "";
}

void list_data_files(const fs::path& folder, int depth, std::vector<fs::path>& files) {
  TESSERA_CHECK(depth <= kDeepest, ErrorKind::kConfig, "[data.files] {}: folders are nested more than {} deep.",
                folder.string(), kDeepest);
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().filename().string().starts_with('.')) continue;
    if (entry.is_directory()) {
      list_data_files(entry.path(), depth + 1, files);
    } else if (entry.is_regular_file() && is_data_name(entry.path())) {
      files.push_back(entry.path());
    }
    TESSERA_CHECK(files.size() <= kMostFiles, ErrorKind::kConfig,
                  "[data.files] {}: more than {} files. Name them by patterns.", folder.string(), kMostFiles);
  }
  TESSERA_CHECK(!error, ErrorKind::kIo, "[data.files] {}: cannot be listed: {}", folder.string(), error.message());
}

// Chooses the files of one split. source.path may hold one data set only: all chosen files must be in the same folder.
// If a file is in a folder below source.path that is named after the split, this check uses the parent of that folder
// instead.
std::vector<fs::path> files_of_folder(const DataSource& source, const std::string& purpose) {
  const fs::path root = source.path;
  std::vector<fs::path> all;
  list_data_files(root, 0, all);
  TESSERA_CHECK(!all.empty(), ErrorKind::kIo,
                "[data.files] {}: the folder holds no data: no .jsonl, .json, .txt, .parquet or .idx, with .gz or not.",
                root.string());
  std::set<std::string> splits;
  for (const auto& file : all) splits.insert(split_of(file, root));
  const bool named = splits.size() > 1 || !splits.contains("");
  const std::string wanted = source.split.empty() ? purpose : source.split;
  std::vector<fs::path> files;
  for (const auto& file : all) {
    if ((!named && source.split.empty()) || split_of(file, root) == wanted) files.push_back(file);
  }
  splits.erase("");
  TESSERA_CHECK(!files.empty(), ErrorKind::kConfig,
                "[data.files] {}: it has no split {}; its splits are: {}. Set split: to one of them.", root.string(),
                quote(wanted), splits.empty() ? "none" : fmt::format("{}", fmt::join(splits, ", ")));
  std::set<fs::path> folders;
  for (const auto& file : files) folders.insert(file.parent_path());
  std::set<std::string> outer;  // data/train/... and data/validation/... are one data set
  for (const auto& folder : folders) {
    const auto name = split_of(folder / "x", folder.parent_path());
    outer.insert((name == wanted && folder != root ? folder.parent_path() : folder).string());
  }
  TESSERA_CHECK(outer.size() == 1, ErrorKind::kConfig,
                "[data.files] {}: it holds several data sets, in {}. Name one of these folders.", root.string(),
                fmt::join(outer, " and "));
  return files;
}

std::vector<fs::path> files_of_pattern(const std::string& pattern) {
  glob_t found{};
  const int result = ::glob(pattern.c_str(), GLOB_BRACE, nullptr, &found);
  std::vector<fs::path> files;
  for (size_t i = 0; result == 0 && i < found.gl_pathc; ++i) {
    if (!fs::is_directory(found.gl_pathv[i])) files.emplace_back(found.gl_pathv[i]);
  }
  ::globfree(&found);
  TESSERA_CHECK(!files.empty(), ErrorKind::kIo, "[data.files] {}: no file name matches this pattern.", pattern);
  return files;
}

}  // namespace

std::vector<DataFile> files_of(const DataSource& source, const std::string& purpose) {
  std::error_code ignored;
  const fs::path path = source.path;
  std::vector<fs::path> paths;
  if (fs::is_directory(path, ignored)) {
    paths = files_of_folder(source, purpose);
  } else if (fs::exists(path, ignored)) {
    paths = {path};
  } else if (source.path.find_first_of("*?[{") != std::string::npos) {
    paths = files_of_pattern(source.path);
  } else if (fs::exists(source.path + ".idx", ignored)) {  // Megatron's name of a pair of files
    paths = {source.path + ".idx"};
  } else {
    raise(ErrorKind::kIo, "[data.files] {}: no such file or folder.{}", source.path, hub_hint(source.path));
  }
  std::ranges::sort(paths);
  std::vector<DataFile> files;
  for (const auto& file : paths) {
    const bool ids = source.format == "megatron" || file.extension() == ".bin" || file.extension() == ".idx";
    auto container = ids ? DataContainer::kMegatron : container_of(file);
    TESSERA_CHECK(source.format != "auto" || !is_table(file), ErrorKind::kConfig,
                  "[data.files] {}: CSV and TSV tables are not read. Convert the file to .jsonl or .parquet, or set "
                  "data.format=text to train on it as plain text.",
                  file.string());
    if (source.format == "text" && container != DataContainer::kParquet) container = DataContainer::kText;
    if (source.format != "text" && source.format != "auto" && container == DataContainer::kText) {
      container = DataContainer::kJsonLines;  // records, whatever the file's extension is
    }
    files.push_back({file, container});
  }
  const std::set<fs::path> named(paths.begin(), paths.end());
  std::erase_if(files,
                [&](const DataFile& file) {  // both files of a pair may be listed
                  if (file.container != DataContainer::kMegatron || file.path.extension() != ".bin") return false;
                  auto index = file.path;
                  return named.contains(index.replace_extension(".idx"));
                });
  for (const auto& file : files) {
    TESSERA_CHECK(file.container == files.front().container, ErrorKind::kConfig,
                  "[data.files] {}: {} is {}, {} is {}. Select files of one kind by a pattern, e.g. {}.", source.path,
                  files.front().path.string(), to_string(files.front().container), file.path.string(),
                  to_string(file.container), (file.path.parent_path() / "*.jsonl").string());
  }
  if (fs::is_directory(path, ignored)) check_shards(files);
  return files;
}

}  // namespace tessera::data
