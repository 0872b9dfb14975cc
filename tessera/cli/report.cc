#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"
#include "tessera/report/page.h"
#include "tessera/report/report_file.h"

namespace tessera::cli {
namespace {

constexpr int kPictureWidth = 1400;

// The height of the page in pixels: four rows of charts; for several runs also longer legends and the table of settings
// in which they differ.
int picture_height(const std::vector<report::RunHistory>& runs) {
  if (runs.size() == 1) return 1640;
  return 1760 + 80 * static_cast<int>(runs.size()) + 32 * static_cast<int>(report::differing_settings(runs).size());
}

// Rewrites `--png FILE.png` to `--png -o FILE.png`, and `--png=FILE` to `--png -o FILE`, because CLI11 has no flag with
// an optional value.
std::vector<std::string> expand_png_flag(VerbArguments args) {
  constexpr std::string_view kFlag = "--png", kGiven = "--png=";
  std::vector<std::string> words;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto& word = args[i];
    const bool has_file_name = word.starts_with(kGiven);
    words.push_back(has_file_name ? std::string(kFlag) : word);
    if (has_file_name) {
      words.insert(words.end(), {"-o", word.substr(kGiven.size())});
    } else if (word == kFlag && i + 1 < args.size() && args[i + 1].ends_with(".png")) {
      words.insert(words.end(), {"-o", args[++i]});
    }
  }
  return words;
}

}  // namespace

int run_report(VerbArguments args) {
  const auto app = make_app("report");
  std::vector<std::string> folders;
  std::string out;
  bool png = false;
  app->add_option("RUN", folders, "Folders of runs (their checkpoint.dir); several runs are drawn in the same charts")
      ->option_text("...");
  app->add_option("-o", out, "File to write (report.html, or report.png)")->option_text("FILE");
  app->add_flag("--png", png,
                "Write a picture of the charts, drawn by an installed Chromium; --png FILE.png names the file");
  app->footer(
      "Writes one HTML file that a browser opens without a network: losses, norms, speed and memory by step, samples,\n"
      "warnings, restarts, recipes, and for several runs the settings in which they differ. The runs may still be\n"
      "running, or have been killed. An existing file is replaced only if it is a report.");
  if (const auto code = parse_flags(*app, expand_png_flag(args))) return *code;
  TESSERA_CHECK(!folders.empty(), ErrorKind::kConfig, "[report] no run given. Usage: tessera report RUN...");
  if (out.empty()) out = png ? "report.png" : "report.html";
  TESSERA_CHECK(!png || out.ends_with(".png"), ErrorKind::kConfig,
                "[report] -o {}: --png writes a picture. Choose a name that ends in .png.", quote(out));
  TESSERA_CHECK(png || !out.ends_with(".png"), ErrorKind::kConfig,
                "[report] -o {}: an HTML page would get the name of a picture. Add --png, or choose another name.",
                quote(out));
  // The output path is checked after the runs are read, but before a page is made or a browser is started.
  std::vector<report::RunHistory> runs;
  for (const auto& folder : folders) runs.push_back(report::read_run(folder));
  report::check_report_path(out);
  const auto page = report::render_page(runs);
  report::write_report(out, png ? report::picture_of(page, kPictureWidth, picture_height(runs)) : page);
  for (const auto& run : runs) {
    std::printf("%s: %zu steps, %s\n", run.name.c_str(), run.steps.step.size(), run.state.c_str());
    for (const auto& note : run.notes) std::fprintf(stderr, "%s: %s\n", run.name.c_str(), note.c_str());
  }
  std::printf("wrote %s\n", out.c_str());
  return 0;
}

}  // namespace tessera::cli
