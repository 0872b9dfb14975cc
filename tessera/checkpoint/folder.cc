#include "tessera/checkpoint/folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <set>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/log.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLatest = "LATEST";
constexpr const char* kManifest = "manifest.json";

bool all_in(std::string_view text, std::string_view characters) {
  return !text.empty() && text.find_first_not_of(characters) == text.npos;
}

// Matches step-00000050 and step-00000050-2.
bool is_step_name(std::string_view name) {
  constexpr std::string_view kDigits = "0123456789";
  if (!name.starts_with("step-")) return false;
  name.remove_prefix(5);
  const size_t dash = name.find('-');
  return name.substr(0, dash).size() >= 8 && all_in(name.substr(0, dash), kDigits) &&
         (dash == name.npos || all_in(name.substr(dash + 1), kDigits));
}

// Matches the names that create_temporary() gives to folders of a checkpoint or to LATEST while they are written,
// .STEM.RANDOM.tmp, and step-XXXXXXXX.tmp of earlier versions.
bool is_staged_name(std::string_view name) {
  if (!name.ends_with(".tmp")) return false;
  name.remove_suffix(4);
  if (is_step_name(name)) return true;
  const size_t dot = name.rfind('.');
  if (!name.starts_with('.') || dot == 0 || dot == name.npos) return false;
  const auto stem = name.substr(1, dot - 1), random = name.substr(dot + 1);
  return random.size() == 16 && all_in(random, "0123456789abcdef") && (is_step_name(stem) || stem == kLatest);
}

std::string step_name(int64_t step) { return fmt::format("step-{:08}", step); }

bool on_one_device(const fs::path& a, const fs::path& b) {
  struct stat first {
  }, second{};
  return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 && first.st_dev == second.st_dev;
}

int make_folder(const fs::path& name) { return ::mkdir(name.c_str(), 0755) == 0 ? 0 : errno; }

}  // namespace

std::optional<std::string> CheckpointFolder::latest_name(const fs::path& folder) {
  const auto pointer = folder / kLatest;
  if (!fs::exists(pointer)) return std::nullopt;
  std::string name = read_file(pointer, 4096);
  while (!name.empty() && name.back() == '\n') name.pop_back();
  TESSERA_CHECK(is_step_name(name), ErrorKind::kFormat,
                "[checkpoint.load] {}: does not name a checkpoint (wanted step-XXXXXXXX)", pointer.string());
  return name;
}

fs::path CheckpointFolder::resolve_latest(const fs::path& path) {
  for (const auto& folder : {path, path / "checkpoints"}) {
    if (const auto name = latest_name(folder)) return folder / *name;
  }
  return path;
}

bool CheckpointFolder::is_run_checkpoint(const fs::path& path) {
  const auto plain = path.has_filename() ? path : path.parent_path();
  return is_step_name(plain.filename().string()) && fs::exists(fs::absolute(plain).parent_path() / kLatest);
}

void CheckpointFolder::remove_leftovers() noexcept {
  try {
    if (!fs::is_directory(folder_)) return;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (is_staged_name(entry.path().filename().string())) fs::remove_all(entry.path());
    }
  } catch (const std::exception& error) {
    log_warning("[checkpoint.save] {}: the remains of an earlier save cannot be removed: {}", folder_.string(),
                error.what());
  }
}

fs::path CheckpointFolder::create_staged(int64_t step) {
  std::error_code failed;
  fs::create_directories(folder_, failed);  // an error is reported by create_temporary()
  return create_temporary(folder_, step_name(step), make_folder);
}

void CheckpointFolder::discard_staged(const fs::path& staged) noexcept {
  std::error_code ignored;
  fs::remove_all(staged, ignored);
}

// Everything is written and synced before the rename, and LATEST is replaced after it. So a crash at any point leaves
// LATEST on a complete checkpoint. If LATEST cannot be written, the rename is undone, because save() reports this
// checkpoint as failed.
std::string CheckpointFolder::publish(const fs::path& staged, Manifest manifest) {
  refresh_known();
  manifest.number = 1;
  for (const auto& [name, known] : known_) manifest.number = std::max(manifest.number, known.number + 1);
  publish_file(staged / kManifest, manifest.dump());
  std::string name = step_name(manifest.step);
  for (int copy = 2; fs::exists(fs::symlink_status(folder_ / name)); ++copy) {
    name = fmt::format("{}-{}", step_name(manifest.step), copy);
  }
  fs::rename(staged, folder_ / name);
  sync_folder(folder_);
  try {
    publish_file(folder_ / kLatest, name + "\n");
  } catch (const std::exception&) {
    std::error_code ignored;
    fs::rename(folder_ / name, staged, ignored);
    discard_staged(staged);
    throw;
  }
  known_[name] = {true, manifest.number, manifest.step, manifest.validation_loss};
  return name;
}

// Whether a folder was written by a save alone: it has a valid manifest and no file that the manifest does not list.
// Anything else is kept, because it may hold a user's files.
CheckpointFolder::PublishedCheckpoint CheckpointFolder::examine(const std::string& name) const {
  const auto path = folder_ / name;
  try {
    const auto manifest = Manifest::parse(read_file(path / kManifest), path / kManifest);
    std::set<std::string> ours = {kManifest};
    for (const auto& file : manifest.files) ours.insert(file.name);
    for (const auto& entry : fs::directory_iterator(path)) {
      const auto inside = entry.path().filename().string();
      TESSERA_CHECK(ours.contains(inside), ErrorKind::kFormat, "it holds {}, which its manifest does not list", inside);
    }
    return {true, manifest.number, manifest.step, manifest.validation_loss};
  } catch (const std::exception& error) {
    log_warning("[checkpoint.prune] {} is not deleted: {}", path.string(), error.what());
    return {};
  }
}

// Updates known_ to the checkpoints that are in the folder now. Only checkpoints that known_ does not have are
// examined.
void CheckpointFolder::refresh_known() {
  std::map<std::string, PublishedCheckpoint> found;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const auto name = entry.path().filename().string();
    if (!is_step_name(name) || !fs::is_directory(entry.symlink_status())) continue;
    const auto known = known_.find(name);
    found.emplace(name, known != known_.end() ? known->second : examine(name));
  }
  known_ = std::move(found);
}

// LATEST is changed before later checkpoints are moved. So an interruption leaves LATEST on the chosen checkpoint, with
// some of the later checkpoints still in the folder.
std::vector<std::string> CheckpointFolder::rewind_to(const std::string& name,
                                                     const std::function<fs::path()>& make_archive_folder) {
  refresh_known();
  const auto manifest = folder_ / name / kManifest;
  const int64_t step = Manifest::parse(read_file(manifest), manifest).step;
  std::vector<std::string> later;
  for (const auto& [each, known] : known_) {
    if (known.ours && known.step > step) later.push_back(each);
  }
  const auto into = later.empty() ? fs::path() : make_archive_folder();
  TESSERA_CHECK(later.empty() || on_one_device(folder_, into), ErrorKind::kIo,
                "[checkpoint.resume] {}: later checkpoints cannot be moved to {}, which is on another file system. "
                "Move them yourself, or resume into another checkpoint.dir.",
                folder_.string(), into.string());
  publish_file(folder_ / kLatest, name + "\n");
  for (const auto& each : later) {
    fs::rename(folder_ / each, into / each);
    known_.erase(each);
  }
  if (!later.empty()) {
    sync_folder(into);
    sync_folder(folder_);
  }
  return later;
}

namespace {

// Deletes the files of a folder in 4 threads, because unlink() takes about 1/6 s per GB to free a file's pages. The
// caller's remove_all() reports files that cannot be deleted.
void unlink_files(const fs::path& folder) {
  constexpr size_t kAtOnce = 4;
  std::vector<fs::path> files;
  std::error_code over;
  for (fs::directory_iterator entry(folder, over), end; !over && entry != end; entry.increment(over)) {
    files.push_back(entry->path());
  }
  std::atomic<size_t> next{0};
  std::vector<std::jthread> threads;
  for (size_t i = 0; i < std::min(kAtOnce, files.size()); ++i) {
    threads.emplace_back([&] {
      for (size_t at = next++; at < files.size(); at = next++) ::unlink(files[at].c_str());
    });
  }
}

}  // namespace

// Renames the folder to a temporary name before its files are deleted, so a folder with the name of a checkpoint is
// always complete. An interrupted deletion is finished by remove_leftovers().
void CheckpointFolder::remove(const std::string& name) const {
  const auto hidden = create_temporary(folder_, name, make_folder);
  std::error_code failed;
  fs::rename(folder_ / name, hidden, failed);
  const auto reason = failed;
  if (!reason) unlink_files(hidden);
  fs::remove_all(hidden, failed);
  if (!reason && !failed) return;
  log_warning("[checkpoint.prune] {} cannot be deleted: {}", (folder_ / name).string(),
              (reason ? reason : failed).message());
}

void CheckpointFolder::prune(int64_t keep_last, int64_t keep_best) noexcept {
  if (keep_last <= 0) return;
  try {
    const auto latest = latest_name(folder_);
    refresh_known();
    using Item = std::map<std::string, PublishedCheckpoint>::value_type;
    std::vector<const Item*> ours, ranked;
    for (const auto& item : known_) {
      if (item.second.ours) ours.push_back(&item);
      const bool has_loss = item.second.validation_loss && std::isfinite(*item.second.validation_loss);
      if (item.second.ours && has_loss) ranked.push_back(&item);
    }
    const auto order = [](const Item* item) { return std::pair(item->second.number, item->second.step); };
    std::ranges::sort(ours, [&](const Item* a, const Item* b) { return order(a) > order(b); });
    std::ranges::sort(ranked, [&](const Item* a, const Item* b) {
      const auto x = *a->second.validation_loss, y = *b->second.validation_loss;
      return x != y ? x < y : order(a) < order(b);
    });
    std::set<std::string> kept;
    if (latest) kept.insert(*latest);
    for (size_t i = 0; i < std::min(ours.size(), static_cast<size_t>(keep_last)); ++i) kept.insert(ours[i]->first);
    for (size_t i = 0; i < std::min(ranked.size(), static_cast<size_t>(keep_best)); ++i) kept.insert(ranked[i]->first);
    for (const Item* item : ours) {
      // The checkpoint is examined again, because a user may have put a file into it since the last examination.
      if (!kept.contains(item->first) && examine(item->first).ours) remove(item->first);
    }
  } catch (const std::exception& error) {
    log_warning("[checkpoint.prune] {}: {}. No more checkpoints are deleted.", folder_.string(), error.what());
  }
}

}  // namespace tessera
