#include "tessera/report/run_history.h"

#include <fmt/ranges.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
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
    train::OutlierDetector losses, norms;
    const auto column = [&](const char* name) -> const std::vector<double>& { return run_.steps.columns[name]; };
    for (const double loss : column("loss")) run_.loss_z.push_back(losses.add(loss));
    for (const double norm : column("grad_norm")) run_.grad_norm_z.push_back(norms.add(norm));
  }

 private:
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
    } else if (row.contains("sample")) {
      const auto& sample = row.at("sample");
      run_.samples.push_back({step, text_of(sample.at("prompt")), text_of(sample.at("text"))});
    } else if (row.contains("early_stop")) {
      run_.state = "ended early: " + text_of(row.at("early_stop"));
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

  // Objects of numbers, such as the seconds by part, become "seconds.compute" and so on.
  static std::map<std::string, double> numbers(const Json& row, const std::string& prefix = "") {
    std::map<std::string, double> out;
    for (const auto& [key, value] : row.items()) {
      if (key == "step") continue;
      if (value.is_object()) {
        out.merge(numbers(value, prefix + key + "."));
      } else if (value.is_array()) {
        for (size_t i = 0; i < value.size(); ++i) {
          if (value[i].is_number()) out[fmt::format("{}{}.{}", prefix, key, i)] = value[i].get<double>();
        }
      } else {
        out[prefix + key] = value.is_number() ? value.get<double>() : kNothing;
      }
    }
    return out;
  }

  RunHistory& run_;
  std::map<int64_t, std::map<std::string, double>> steps_, validation_;
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
  if (holder_is_alive(folder)) {
    run.state = "running";
  } else if (run.state.empty()) {
    run.state = "not running: it was killed, or is at work on another host";
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
