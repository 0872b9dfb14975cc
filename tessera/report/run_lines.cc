#include "tessera/report/run_lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/text/json.h"

namespace tessera::report {
namespace {

using namespace std::string_literals;

std::string text_of(const Json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

// Copies the fields of RunHistory::profile and checks their types. The file may hold anything; other fields and rows
// beyond kMostRows are dropped. Throws if a field is missing or has another type.
Json parse_profile(const Json& json) {
  constexpr size_t kMostRows = 64;
  const auto number = [](const Json& value) { return value.is_number() ? value.get<double>() : 0; };
  Json out = {{"first_step", json.at("first_step").get<int64_t>()},
              {"last_step", json.at("last_step").get<int64_t>()},
              {"ranks", Json::array()}};
  for (const auto& rank : json.at("ranks")) {
    if (out["ranks"].size() == kMostRows) break;
    Json row = Json::object();
    for (const char* name : {"rank", "compute", "communication", "wait", "data", "checkpoint", "hidden"}) {
      row[name] = number(rank.at(name));
    }
    out["ranks"].push_back(std::move(row));
  }
  for (const char* table : {"operations", "modules", "collectives"}) {
    auto& rows = out[table] = Json::array();
    if (!json.contains(table)) continue;
    for (const auto& row : json.at(table)) {
      if (rows.size() == kMostRows) break;
      rows.push_back({{"name", text_of(row.at("name"))},
                      {"group", row.contains("group") ? text_of(row.at("group")) : ""},
                      {"calls", row.at("calls").get<int64_t>()},
                      {"seconds", number(row.at("seconds"))},
                      {"bytes", row.contains("bytes") ? number(row.at("bytes")) : 0}});
    }
  }
  return out;
}

// The columns of a line that the page draws. Nested values get names such as "parts.compute" and
// "communication_by_rank.0". Unknown keys are ignored, so that a file cannot create any number of columns.
std::map<std::string, double> drawn_columns(const Json& row) {
  std::map<std::string, double> out;
  const auto number = [](const Json& value) { return value.is_number() ? value.get<double>() : kMissing; };
  for (const char* name : {"loss", "validation_loss", "grad_norm", "balance_loss", "lr", "tokens_per_second",
                           "memory_bytes", "peak_share", "seconds"}) {
    if (const auto found = row.find(name); found != row.end()) out[name] = number(*found);
  }
  if (const auto parts = row.find("parts"); parts != row.end() && parts->is_object()) {
    for (const char* name : {"compute", "communication", "wait", "data", "checkpoint"}) {
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

template <class T>
void keep_last(std::vector<T>& all, size_t max_size) {
  if (all.size() > max_size) all.erase(all.begin());
}

}  // namespace

bool RunLines::add_line(std::string_view line) {
  try {
    // The kind of a line is its key other than "step". The line of a new session clears `state`, which says how an
    // earlier session ended.
    const Json row = parse_json_object(line, "[report] line");
    const int64_t step = JsonReader(row, "[report] line").integer("step", -1, 0, INT64_MAX);
    if (step < 0) return false;
    if (row.contains("session")) {
      RunSession session{.first_step = step, .facts = {}};
      for (const auto& [key, value] : row.at("session").items()) session.facts.emplace_back(key, text_of(value));
      history_.sessions.push_back(std::move(session));
      history_.state.clear();
    } else if (row.contains("warning")) {
      history_.warnings.push_back({step, text_of(row.at("warning"))});
    } else if (row.contains("restart")) {
      const auto& restart = row.at("restart");
      history_.warnings.push_back(
          {step, fmt::format("restart {}: {}", text_of(restart.at("attempt")), text_of(restart.at("reason")))});
    } else if (row.contains("sample")) {
      const auto& sample = row.at("sample");
      history_.samples.push_back({step, text_of(sample.at("prompt")), text_of(sample.at("text"))});
    } else if (row.contains("profile")) {
      history_.profile = parse_profile(row.at("profile"));
    } else if (row.contains("early_stop")) {
      early_stop_ = {step, text_of(row.at("early_stop"))};
    } else if (row.contains("end")) {
      if (history_.state.empty()) history_.state = text_of(row.at("end"));
    } else if (row.contains("validation_loss")) {
      validation_.put(step, drawn_columns(row));
    } else if (row.contains("loss")) {
      steps_.put(step, drawn_columns(row));
    } else {
      return false;
    }
  } catch (const std::exception&) {  // the line is no JSON object, or a value has another type
    return false;
  }
  keep_last(history_.sessions, limits_.events);
  keep_last(history_.warnings, limits_.events);
  keep_last(history_.samples, limits_.events);
  return true;
}

RunHistory RunLines::history() const {
  RunHistory run = history_;
  run.steps = steps_.series();
  run.step_count = steps_.step_count();
  run.validation = validation_.series();
  run.loss_z = steps_.loss_scores();
  run.grad_norm_z = steps_.grad_norm_scores();
  // A line "early_stop" is ignored if the run has later steps: the run was then resumed with other settings.
  const auto& steps = run.steps.step;
  if (early_stop_ && (steps.empty() || early_stop_->step >= steps.back())) {
    run.state = "ended early: " + early_stop_->text;
  }
  return run;
}

}  // namespace tessera::report
