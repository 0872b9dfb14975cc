#include "tessera/report/page.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/version.h"
#include "tessera/report/page_parts.h"
#include "tessera/train/output/outliers.h"

namespace tessera::report {
namespace {

using nlohmann::ordered_json;

// The columns of a series at the given rows. dump_json() writes values that are not finite as null.
ordered_json series(const MetricSeries& all, const std::vector<size_t>& rows) {
  ordered_json out = {{"step", ordered_json::array()}};
  for (const size_t row : rows) out["step"].push_back(all.step[row]);
  for (const auto& [name, values] : all.columns) {
    auto& column = out[name] = ordered_json::array();
    for (const size_t row : rows) column.push_back(values[row]);
  }
  return out;
}

// Steps and z-scores of the rows that are outliers.
ordered_json outliers(const std::vector<int64_t>& steps, const std::vector<double>& scores) {
  ordered_json out = ordered_json::array();
  for (size_t row = 0; row < scores.size(); ++row) {
    if (!(std::abs(scores[row]) >= train::kOutlierZ)) continue;
    out.push_back({{"step", steps[row]}, {"z", scores[row]}});
  }
  return out;
}

ordered_json as_json(const RunHistory& run, const std::string& name, size_t most_points) {
  constexpr size_t kMostValues = 400'000;  // values in all columns together; a browser parses these without delay
  // kMostValues limits rows times columns: with many columns (one per rank, one per part of a step) the page has fewer
  // rows.
  most_points = std::min(most_points, kMostValues / std::max<size_t>(run.steps.columns.size(), 1));
  ordered_json out = {{"name", name},
                      {"folder", run.folder.string()},
                      {"state", run.state},
                      {"recipe", run.recipe},
                      {"rows", std::max(run.steps.step.size(), run.step_count)},
                      {"steps", series(run.steps, thinned_rows(run.steps, most_points))},
                      {"validation", series(run.validation, thinned_rows(run.validation, most_points))},
                      {"loss_outliers", outliers(run.steps.step, run.loss_z)},
                      {"grad_norm_outliers", outliers(run.steps.step, run.grad_norm_z)},
                      {"samples", ordered_json::array()},
                      {"warnings", ordered_json::array()},
                      {"sessions", ordered_json::array()},
                      {"notes", run.notes}};
  if (!run.profile.is_null()) out["profile"] = run.profile;
  for (const auto& sample : run.samples) {
    out["samples"].push_back({{"step", sample.step}, {"prompt", sample.prompt}, {"text", sample.text}});
  }
  for (const auto& note : run.warnings) out["warnings"].push_back({{"step", note.step}, {"text", note.text}});
  for (const auto& session : run.sessions) {
    out["sessions"].push_back({{"first_step", session.first_step}, {"facts", session.facts}});
  }
  return out;
}

// The names of the runs; runs with the same name are shown with their folders.
std::vector<std::string> display_names(const std::vector<RunHistory>& runs) {
  std::vector<std::string> names;
  for (const auto& run : runs) {
    const auto alike = std::ranges::count_if(runs, [&](const auto& other) { return other.name == run.name; });
    names.push_back(alike > 1 ? run.folder.string() : run.name);
  }
  return names;
}

// Escapes "<" in JSON, so that text of a run that holds "</script>" or "<!--" cannot end the script element.
std::string escape_for_script(std::string_view text) {
  std::string out;
  for (const char c : text) c == '<' ? out += "\\u003c" : out += c;
  return out;
}

void replace_mark(std::string& page, std::string_view mark, std::string_view content) {
  const size_t at = page.find(mark);
  TESSERA_CHECK(at != page.npos, ErrorKind::kInternal, "[report.page] page.html: found no {}", mark);
  page.replace(at, mark.size(), content);
}

}  // namespace

std::string page_data(const std::vector<RunHistory>& runs, size_t most_points) {
  ordered_json out = {{"version", version()}, {"differing", differing_settings(runs)}, {"runs", ordered_json::array()}};
  const auto names = display_names(runs);
  for (size_t i = 0; i < runs.size(); ++i) out["runs"].push_back(as_json(runs[i], names[i], most_points));
  return dump_json(out);
}

std::string page_around(std::string_view data) {
  const auto& parts = page_parts();
  TESSERA_CHECK(!parts.chart_script.empty(), ErrorKind::kConfig,
                "[report.page] this program was built without uPlot, which draws the charts. Build it where npm can "
                "fetch the package (./dev build).");
  std::string page(parts.html);
  // The data is inserted last: it holds text of users, and a text such as "/*STYLE*/" in it must not be replaced.
  replace_mark(page, "/*CHART STYLE*/", parts.chart_style);
  replace_mark(page, "/*STYLE*/", parts.style);
  replace_mark(page, "/*CHART SCRIPT*/", parts.chart_script);
  replace_mark(page, "/*SCRIPT*/", parts.script);
  replace_mark(page, "/*DATA*/", escape_for_script(data));
  return page;
}

std::string render_page(const std::vector<RunHistory>& runs, size_t most_points) {
  return page_around(page_data(runs, most_points));
}

}  // namespace tessera::report
