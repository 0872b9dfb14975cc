#include "tessera/report/run_follower.h"

#include <fmt/ranges.h>
#include <signal.h>

#include <cerrno>
#include <cstdio>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/machine/host.h"
#include "tessera/train/output/run_mark.h"
#include "tessera/train/recipe/yaml_tree.h"

namespace tessera::report {
namespace {

namespace fs = std::filesystem;

// A value as one line of text, for display only.
std::string inline_yaml(const train::YamlNode& node) {
  using Kind = train::YamlNode::Kind;
  std::vector<std::string> parts;
  if (node.kind == Kind::kScalar) return node.text;
  if (node.kind == Kind::kSequence) {
    for (const auto& item : node.items) parts.push_back(inline_yaml(item));
    return fmt::format("[{}]", fmt::join(parts, ", "));
  }
  for (const auto& [key, value] : node.entries) parts.push_back(key + ": " + inline_yaml(value));
  return parts.empty() ? "null" : fmt::format("{{{}}}", fmt::join(parts, ", "));
}

// Appends a pair "section.key", value for each leaf below `node`.
void flatten(const train::YamlNode& node, const std::string& path,
             std::vector<std::pair<std::string, std::string>>& out) {
  using Kind = train::YamlNode::Kind;
  if (node.kind == Kind::kMapping && !node.entries.empty()) {
    for (const auto& [key, value] : node.entries) flatten(value, path.empty() ? key : path + "." + key, out);
    return;
  }
  out.emplace_back(path, inline_yaml(node));
}

std::vector<std::pair<std::string, std::string>> read_recipe(const fs::path& folder) {
  // A run writes its settings to recipe.yaml or, if the user has changed that file, to recipe.resolved.yaml. So
  // recipe.resolved.yaml is read if it exists.
  for (const char* name : {"recipe.resolved.yaml", "recipe.yaml"}) {
    const auto path = folder / name;
    if (!fs::is_regular_file(path)) continue;
    std::vector<std::pair<std::string, std::string>> out;
    flatten(train::parse_yaml(read_file(path), path.string()), "", out);
    return out;
  }
  return {};
}

// Whether the process that locked the folder last, "pid N on HOST", still runs on this host. The lock itself is not
// tested: taking it, even for a moment, could make a run that starts now fail.
bool holder_is_alive(const fs::path& folder) {
  const auto path = train::private_folder(folder) / "lock";
  if (!fs::is_regular_file(path)) return false;
  const auto text = read_file(path);
  long pid = 0;
  char host[256] = {};
  if (std::sscanf(text.c_str(), "pid %ld on %255s", &pid, host) != 2 || host != host_name() || pid <= 0) return false;
  return ::kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM;
}

}  // namespace

RunFollower::RunFollower(fs::path folder, HistoryLimits limits)
    : folder_(std::move(folder)),
      limits_(limits),
      metrics_{.lines = GrowingLines(folder_ / "metrics.jsonl")},
      events_{.lines = GrowingLines(folder_ / "events.jsonl")},
      lines_(limits) {}

// metrics.jsonl and events.jsonl refer to the same steps, so both files are read again from the start if one of them
// was replaced or cut.
RunHistory RunFollower::history() {
  TESSERA_CHECK(fs::is_directory(folder_), ErrorKind::kConfig,
                "[report] {}: found no folder of this name, wanted the folder of a run (its checkpoint.dir).",
                folder_.string());
  TESSERA_CHECK(fs::is_regular_file(metrics_.lines.path()), ErrorKind::kConfig,
                "[report] {}: found no metrics.jsonl in it. Give the folder of a run with log.jsonl=true.",
                folder_.string());
  if (!metrics_.lines.is_continued() || !events_.lines.is_continued()) {
    for (FollowedFile* file : {&metrics_, &events_}) {
      file->lines.restart();
      file->skipped = 0;
    }
    lines_ = RunLines(limits_);
  }
  std::vector<std::string> notes;
  for (FollowedFile* file : {&metrics_, &events_}) {
    file->lines.read([&](std::string_view line) { file->skipped += lines_.add_line(line) ? 0 : 1; });
    if (file->skipped == 0) continue;
    notes.push_back(
        fmt::format("{} lines of {} could not be read", file->skipped, file->lines.path().filename().string()));
  }
  RunHistory run = lines_.history();
  run.folder = folder_;
  run.name = fs::weakly_canonical(folder_).filename().string();
  run.notes = std::move(notes);
  run.recipe = read_recipe(folder_);
  if (run.state.empty()) {  // no line says how the run ended
    run.state = holder_is_alive(folder_) ? "running" : "not running: it was killed, or runs on another host";
  }
  return run;
}

}  // namespace tessera::report
