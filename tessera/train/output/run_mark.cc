#include "tessera/train/output/run_mark.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/mapped_file.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/random_hex.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormatName = "tessera.run";
constexpr int kVersion = 1;
constexpr JsonLimits kMarkLimits{.max_bytes = size_t{1} << 20, .max_depth = 8, .max_keys = 10'000};
constexpr size_t kMostHashed = size_t{16} << 20;

// All names that a run may write into its folder, except trace/, which holds only flight records.
constexpr const char* kNames[] = {"recipe.yaml", "recipe.resolved.yaml", "metrics.jsonl", "events.jsonl",
                                  "tensorboard", "checkpoints",          "model",         "previous",
                                  "profile"};
constexpr const char* kPrivateNames[] = {"lock", "staging", "run.json"};

fs::path mark_path(const fs::path& dir) { return private_folder(dir) / "run.json"; }

// Whether `path` exists and is not an empty folder.
bool is_taken(const fs::path& path) {
  const auto status = fs::symlink_status(path);
  if (!fs::exists(status)) return false;
  return !fs::is_directory(fs::status(path)) || !fs::is_empty(path);
}

std::string hex(uint64_t hash) { return fmt::format("{:016x}", hash); }

// The line "NAME SIZE HASH" of a file. Of a large file only some blocks are hashed, one after the other: the hash of
// the blocks so far is the seed of the next block's hash, so that the order of the blocks matters.
std::string line_of(const fs::path& path, const std::string& name) {
  const auto file = MappedFile::open(path);
  const auto bytes = file->bytes();
  uint64_t hash = 0;
  if (bytes.size() <= kMostHashed) {
    hash = XXH3_64bits(bytes.data(), bytes.size());
  } else {
    // Hashes 66 blocks of the file at equal distances from its beginning, and then one more block, which ends exactly
    // at the end of the file.
    constexpr size_t kBlock = 4096, kBlocks = 66;
    for (size_t block = 0; block < kBlocks; ++block) {
      const size_t begin = (bytes.size() - kBlock) / (kBlocks - 1) * block;
      hash = XXH3_64bits_withSeed(bytes.data() + begin, kBlock, hash);
    }
    hash = XXH3_64bits_withSeed(bytes.data() + bytes.size() - kBlock, kBlock, hash);
  }
  return fmt::format("{} {} {}\n", name, bytes.size(), hex(hash));
}

std::string hash_of(const std::string& text) { return hex(XXH3_64bits(text.data(), text.size())); }

}  // namespace

fs::path private_folder(const fs::path& dir) { return dir / ".tessera"; }

std::string fingerprint_of(const fs::path& path) {
  const auto status = fs::symlink_status(path);
  if (fs::is_regular_file(status)) return hash_of(line_of(path, ""));
  if (!fs::is_directory(status)) return fs::exists(status) ? "other" : "";
  std::vector<std::string> lines;
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    const auto name = entry.path().lexically_relative(path).string();
    const auto each = entry.symlink_status();
    if (!fs::is_directory(each)) {
      lines.push_back(fs::is_regular_file(each) ? line_of(entry.path(), name) : name + " other\n");
    }
  }
  std::ranges::sort(lines);
  std::string listing;
  for (const auto& line : lines) listing += line;
  return hash_of(listing);
}

RunMark::RunMark(fs::path dir) : dir_(std::move(dir)) {
  const auto path = mark_path(dir_);
  if (!fs::exists(fs::symlink_status(path))) return;
  // The mark file is untrusted: its size, its depth and the number of its keys are limited, and every value is checked
  // for its type.
  const std::string where = "[train.run_folder] " + path.string();
  const std::string text = read_file(path, kMarkLimits.max_bytes);
  try {
    const Json json = parse_json_object(text, where, kMarkLimits);
    const JsonReader mark(json, where);
    if (mark.string("format") != kFormatName) mark.at("format").fail(kFormatName);
    mark.integer("version", std::nullopt, kVersion, kVersion);
    id_ = mark.string("id");
    if (const auto own = mark.find("own")) {
      for (const auto& [name, hashes] : own->members()) {
        for (const auto& hash : hashes.items()) fingerprints_[name].push_back(hash.as_string());
      }
    }
  } catch (const Error& error) {
    raise(error.kind(), "{}. It is not the mark of a run ({}, version {}). Choose another checkpoint.dir.",
          error.what(), kFormatName, kVersion);
  }
  set_ = true;
}

void RunMark::check_names_unused() const {
  const auto check = [&](const fs::path& path, bool taken) {
    TESSERA_CHECK(
        !taken, ErrorKind::kConfig,
        "[train.run_folder] {}: is in the way, and no run wrote it. Choose another checkpoint.dir (a new or an "
        "empty folder, or that of an earlier run), or move it.",
        path.string());
  };
  for (const char* name : kNames) check(dir_ / name, is_taken(dir_ / name));
  const auto inside = private_folder(dir_);
  const auto status = fs::symlink_status(inside);
  if (!fs::exists(status)) return;
  check(inside, !fs::is_directory(status));
  // A run that was killed before it wrote its mark may have left files in the private folder that have a name in
  // kPrivateNames or end in .tmp. Any other file in this folder belongs to a user.
  for (const auto& entry : fs::directory_iterator(inside)) {
    const auto name = entry.path().filename();
    check(entry.path(),
          std::find(std::begin(kPrivateNames), std::end(kPrivateNames), name) == std::end(kPrivateNames) &&
              !name.string().ends_with(".tmp"));
  }
}

void RunMark::set() {
  if (set_) return;
  id_ = random_hex(8);
  write();
  set_ = true;
}

bool RunMark::owns(const std::string& name) const {
  const auto found = fingerprints_.find(name);
  if (found == fingerprints_.end()) return false;
  const auto hash = fingerprint_of(dir_ / name);
  return !hash.empty() && std::ranges::find(found->second, hash) != found->second.end();
}

// Before a file is replaced, the mark holds the fingerprints of the old and of the new content. A run that is killed at
// any moment therefore leaves a file that the next run recognises as its own. keep_current_fingerprint() then drops the
// old fingerprint.
void RunMark::add_fingerprint(const std::string& name, const std::string& fingerprint) {
  auto& known = fingerprints_[name];
  if (std::ranges::find(known, fingerprint) != known.end()) return;
  known.push_back(fingerprint);
  write();
}

void RunMark::keep_current_fingerprint(const std::string& name) {
  const auto hash = fingerprint_of(dir_ / name);
  auto& known = fingerprints_[name];
  const auto before = known.size();
  std::erase_if(known, [&](const std::string& each) { return each != hash; });
  if (known.size() != before) write();
}

void RunMark::write() const {
  nlohmann::ordered_json json = {{"format", kFormatName}, {"version", kVersion}, {"id", id_}};
  json["own"] = fingerprints_;
  const auto staging = private_folder(dir_) / "staging";
  fs::create_directories(staging);
  publish_file(mark_path(dir_), json.dump(1) + "\n", staging);
}

}  // namespace tessera::train
