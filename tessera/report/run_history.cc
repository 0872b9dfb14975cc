#include "tessera/report/run_history.h"

#include <fmt/ranges.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/host.h"
#include "tessera/base/json.h"
#include "tessera/train/outliers.h"
#include "tessera/train/run_mark.h"
#include "tessera/train/yaml_tree.h"

namespace tessera::report {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;
constexpr uintmax_t kMostBytes = uintmax_t{1} << 30;
constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

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
  for (const char* name : {"recipe.resolved.yaml", "recipe.yaml"}) {
    const auto path = folder / name;
    if (!fs::is_regular_file(path)) continue;
    std::vector<std::pair<std::string, std::string>> out;
    flatten(train::parse_yaml(read_file(path), path.string()), "", out);
    return out;
  }
  return {};
}

std::string text_of(const Json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

// The lines of metrics.jsonl and events.jsonl, sorted by what they tell.
class Reader {
 public:
  explicit Reader(RunHistory& run) : run_(run) {}

  // What follows the last newline is being written.
  void read(const fs::path& path) {
    if (!fs::is_regular_file(path)) return;
    TESSERA_CHECK(fs::file_size(path) <= kMostBytes, ErrorKind::kFormat,
                  "[report] {}: found {} bytes, wanted 1 GiB at most.", path.string(), fs::file_size(path));
    const std::string text = read_file(path);
    size_t skipped = 0;
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != text.npos; begin = end + 1) {
      if (!takes(std::string_view(text).substr(begin, end - begin))) ++skipped;
    }
    if (skipped > 0) {
      run_.notes.push_back(fmt::format("{} lines of {} tell nothing", skipped, path.filename().string()));
    }
  }

  void finish() {
    for (const auto& [step, row] : steps_) run_.steps.add(step, row);
    for (const auto& [step, row] : validation_) run_.validation.add(step, row);
    // A run that has gone on since is not over.
    const auto& steps = run_.steps.step;
    if (early_stop_ && (steps.empty() || early_stop_->step >= steps.back())) {
      run_.state = "ended early: " + early_stop_->text;
    }
    run_.loss_z = scores_of("loss");
    run_.grad_norm_z = scores_of("grad_norm");
  }

 private:
  // Empty where no step has such a value.
  std::vector<double> scores_of(const char* name) const {
    const auto found = run_.steps.columns.find(name);
    if (found == run_.steps.columns.end()) return {};
    std::vector<double> scores;
    train::OutlierDetector detector;
    for (const double value : found->second) scores.push_back(detector.add(value));
    return scores;
  }

  bool takes(std::string_view line) {
    try {
      const Json row = parse_json_object(line, "[report] line");
      const int64_t step = JsonReader(row, "[report] line").integer("step", -1, 0, INT64_MAX);
      return step >= 0 && take(step, row);
    } catch (const std::exception&) {  // no JSON, or a value of another type
      return false;
    }
  }

  bool take(int64_t step, const Json& row) {
    if (row.contains("session")) {
      Session session{.first_step = step, .facts = {}};
      for (const auto& [key, value] : row.at("session").items()) session.facts.emplace_back(key, text_of(value));
      run_.sessions.push_back(std::move(session));
      run_.state.clear();
    } else if (row.contains("warning")) {
      run_.warnings.push_back({step, text_of(row.at("warning"))});
    } else if (row.contains("restart")) {
      const auto& restart = row.at("restart");
      run_.warnings.push_back(
          {step, fmt::format("restart {}: {}", text_of(restart.at("attempt")), text_of(restart.at("reason")))});
    } else if (row.contains("sample")) {
      const auto& sample = row.at("sample");
      run_.samples.push_back({step, text_of(sample.at("prompt")), text_of(sample.at("text"))});
    } else if (row.contains("profile")) {
      run_.profile = profile_of(row.at("profile"));
    } else if (row.contains("early_stop")) {
      early_stop_ = {step, text_of(row.at("early_stop"))};
    } else if (row.contains("end")) {
      if (run_.state.empty()) run_.state = text_of(row.at("end"));
    } else if (row.contains("validation_loss")) {
      validation_[step] = numbers(row);
    } else if (row.contains("loss")) {
      steps_[step] = numbers(row);
    } else {
      return false;
    }
    return true;
  }

  static Profile profile_of(const Json& json) {
    constexpr size_t kMostRows = 64;
    const auto number = [](const Json& value) { return value.is_number() ? value.get<double>() : 0; };
    Profile out{.first_step = json.at("first_step").get<int64_t>(),
                .last_step = json.at("last_step").get<int64_t>(),
                .ranks = {},
                .operations = {},
                .modules = {},
                .collectives = {}};
    for (const auto& rank : json.at("ranks")) {
      if (out.ranks.size() == kMostRows) break;
      auto& row = out.ranks.emplace_back();
      for (const char* name : {"rank", "compute", "communication", "wait", "data", "checkpoint", "hidden"}) {
        row[name] = number(rank.at(name));
      }
    }
    const auto rows = [&](const char* table, std::vector<ProfileRow>& into) {
      if (!json.contains(table)) return;
      for (const auto& row : json.at(table)) {
        if (into.size() == kMostRows) break;
        into.push_back({.name = text_of(row.at("name")),
                        .group = row.contains("group") ? text_of(row.at("group")) : "",
                        .calls = row.at("calls").get<int64_t>(),
                        .seconds = number(row.at("seconds")),
                        .bytes = row.contains("bytes") ? number(row.at("bytes")) : 0});
      }
    };
    rows("operations", out.operations);
    rows("modules", out.modules);
    rows("collectives", out.collectives);
    return out;
  }

  // What the page draws; a file may hold anything. Parts become "parts.compute", ranks "communication_by_rank.0".
  static std::map<std::string, double> numbers(const Json& row) {
    std::map<std::string, double> out;
    const auto number = [](const Json& value) { return value.is_number() ? value.get<double>() : kNothing; };
    for (const char* name : {"loss", "validation_loss", "grad_norm", "balance_loss", "lr", "tokens_per_second",
                             "memory_bytes", "peak_share", "seconds"}) {
      if (const auto found = row.find(name); found != row.end()) out[name] = number(*found);
    }
    if (const auto parts = row.find("parts"); parts != row.end() && parts->is_object()) {
      for (const char* name : {"compute", "communication", "data", "checkpoint"}) {
        if (const auto found = parts->find(name); found != parts->end()) out["parts."s + name] = number(*found);
      }
    }
    if (const auto ranks = row.find("communication_by_rank"); ranks != row.end() && ranks->is_array()) {
      constexpr size_t kMostRanks = 64;
      for (size_t rank = 0; rank < std::min(ranks->size(), kMostRanks); ++rank) {
        out[fmt::format("communication_by_rank.{}", rank)] = number((*ranks)[rank]);
      }
    }
    return out;
  }

  RunHistory& run_;
  std::map<int64_t, std::map<std::string, double>> steps_, validation_;
  std::optional<Note> early_stop_;
};

// "pid N on HOST" of the run that took the folder last. A lock taken here, even for a moment, could turn a starting run
// away.
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

void Series::add(int64_t at, const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) {
    auto& column = columns[name];
    column.resize(step.size(), kNothing);
    column.push_back(value);
  }
  step.push_back(at);
  for (auto& [name, column] : columns) column.resize(step.size(), kNothing);
}

RunHistory read_run(const fs::path& folder) {
  const auto metrics = folder / "metrics.jsonl";
  TESSERA_CHECK(fs::is_directory(folder), ErrorKind::kConfig,
                "[report] {}: found no folder of that name, wanted that of a run (its checkpoint.dir).",
                folder.string());
  TESSERA_CHECK(fs::is_regular_file(metrics), ErrorKind::kConfig,
                "[report] {}: found no metrics.jsonl in it. Give the folder of a run with log.jsonl=true.",
                folder.string());
  RunHistory run;
  run.folder = folder;
  run.name = fs::weakly_canonical(folder).filename().string();
  run.recipe = read_recipe(folder);
  Reader reader(run);
  reader.read(metrics);
  reader.read(folder / "events.jsonl");
  reader.finish();
  if (run.state.empty()) {  // it has not said how it ended
    run.state = holder_is_alive(folder) ? "running" : "not running: it was killed, or is at work on another host";
  }
  return run;
}

std::vector<std::string> differing_settings(const std::vector<RunHistory>& runs) {
  std::vector<std::string> keys;
  std::set<std::string> known;
  for (const auto& run : runs) {
    for (const auto& [key, value] : run.recipe) {
      if (known.insert(key).second) keys.push_back(key);
    }
  }
  const auto value_of = [](const RunHistory& run, const std::string& key) -> std::string {
    const auto found =
        std::find_if(run.recipe.begin(), run.recipe.end(), [&](const auto& row) { return row.first == key; });
    return found == run.recipe.end() ? "null" : found->second;
  };
  std::erase_if(keys, [&](const std::string& key) {
    return std::all_of(runs.begin(), runs.end(),
                       [&](const RunHistory& run) { return value_of(run, key) == value_of(runs.front(), key); });
  });
  return keys;
}

std::vector<size_t> thinned(const Series& steps, size_t most) {
  const size_t count = steps.step.size();
  std::vector<size_t> kept;
  if (count <= most) {
    for (size_t row = 0; row < count; ++row) kept.push_back(row);
    return kept;
  }
  const auto found = steps.columns.find("loss");
  const auto loss = [&](size_t row) {
    const double value = found == steps.columns.end() ? kNothing : found->second[row];
    return std::isfinite(value) ? value : std::numeric_limits<double>::infinity();
  };
  const size_t stretches = std::max<size_t>(most / 2, 2) - 1;
  std::set<size_t> rows = {0, count - 1};
  for (size_t stretch = 0; stretch < stretches; ++stretch) {
    const size_t begin = count * stretch / stretches, end = count * (stretch + 1) / stretches;
    size_t least = begin, largest = begin;
    for (size_t row = begin; row < end; ++row) {
      if (loss(row) < loss(least)) least = row;
      if (loss(row) > loss(largest)) largest = row;
    }
    rows.insert({least, largest});
  }
  return {rows.begin(), rows.end()};
}

}  // namespace tessera::report
