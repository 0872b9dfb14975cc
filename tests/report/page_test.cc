// The report page in headless Chromium. A script at the end of the page acts like a reader, and the test reads the
// resulting page.
#include "tessera/report/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/report/report_file.h"
#include "tests/report/browser.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::report {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Appends a row. Missing values of other columns are kMissing.
void add_row(MetricSeries& series, int64_t step, const std::map<std::string, double>& values) {
  for (const auto& [name, value] : values) {
    auto& column = series.columns[name];
    column.resize(series.step.size(), kMissing);
    column.push_back(value);
  }
  series.step.push_back(step);
  for (auto& [name, column] : series.columns) column.resize(series.step.size(), kMissing);
}

RunHistory made_up(const std::string& name, double offset, int64_t count = 60) {
  RunHistory run;
  run.folder = "runs/" + name;
  run.name = name;
  run.state = "done";
  run.recipe = {{"optimizer.lr", fmt::format("{}", offset)}, {"train.seed", "1"}};
  for (int64_t step = 1; step <= count; ++step) {
    const double at = static_cast<double>(step);
    add_row(run.steps, step,
            {{"loss", offset + 3 / at + (step == 40 ? 5 : 0)},
             {"grad_norm", 1 + 0.01 * std::sin(at)},
             {"lr", 1e-3 / at},
             {"tokens_per_second", 1000 + at},
             {"seconds", 0.5},
             {"memory_bytes", 2.5e9},
             {"peak_share", 0.5}});
    run.loss_z.push_back(step == 40 ? 12.5 : 0);
    run.grad_norm_z.push_back(0);
    if (step % 20 == 0) add_row(run.validation, step, {{"validation_loss", offset + 2.5 / at}});
  }
  run.samples = {{20, "Once </script> upon", "a time <b>&amp;"}};
  run.warnings = {{3, "careful"}};
  run.sessions = {{0, {{"host", "here"}}}};
  return run;
}

TEST(Page, IsSelfContainedAndEscapesItsData) {
  auto run = made_up("demo", 1);
  const auto page = render_page({run});
  EXPECT_THAT(page, AllOf(HasSubstr("Permission is hereby granted"), HasSubstr("uPlot"), Not(HasSubstr("/*DATA*/"))));
  EXPECT_THAT(page, AllOf(Not(HasSubstr("src=")), Not(HasSubstr("href="))));
  EXPECT_THAT(page, AllOf(HasSubstr("Once \\u003c/script> upon"), Not(HasSubstr("Once </script>"))));
  const auto data = nlohmann::json::parse(page_data({run, made_up("demo", 2)}));
  EXPECT_EQ(data["runs"][0]["samples"][0]["prompt"], "Once </script> upon");
  EXPECT_EQ(data["runs"][0]["loss_outliers"][0]["step"], 40);
  EXPECT_EQ(data["differing"], nlohmann::json({"optimizer.lr"}));
  EXPECT_EQ(data["runs"][1]["name"], "runs/demo");  // because both have the same name
}

TEST(Page, ShowsEveryPointAndValuesForPointerAndKeyboard) {
  if (!has_browser()) {
    GTEST_SKIP() << "no chromium in PATH";
  }
  const auto lines = told(render_page({made_up("demo", 1)}), std::string(kInked) + R"(
for (const id of ['loss', 'validation', 'grad_norm', 'lr', 'tokens_per_second', 'seconds', 'memory', 'peak_share']) {
  tell(`${id} ${chart(id).dataset.points} ${inked(id, '--run0') > 100}`);
}
tell(`outlier ${inked('loss', '--alarm') > 10} ${chart('grad_norm') && inked('grad_norm', '--alarm') > 10}`);
tell(`none ${chart('balance_loss') === null}`);
const plot = chart('loss').querySelector('.plot'), over = plot.querySelector('.u-over'), box = over.getBoundingClientRect();
over.dispatchEvent(new MouseEvent('mouseenter', {bubbles: true}));
over.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: box.left + box.width * 39 / 59, clientY: box.top + 9}));
setTimeout(() => {
  tell(`hover ${chart('loss').querySelector('.readout').textContent}`);
  plot.dispatchEvent(new KeyboardEvent('keydown', {key: 'Home', bubbles: true, cancelable: true}));
  setTimeout(() => {
    tell(`home ${chart('loss').querySelector('.readout').textContent}`);
    plot.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true, cancelable: true}));
    setTimeout(() => {
      tell(`right ${chart('loss').querySelector('.readout').textContent} ${chart('loss').querySelector('.readout').getAttribute('aria-live')}`);
      tell(`label ${plot.getAttribute('aria-label')}`);
      tell(`rows ${chart('loss').querySelectorAll('tbody tr').length}`);
      tell(`sample ${document.querySelector('.sample .prompt').textContent}`);
      tell(`text ${document.querySelector('#warnings-list').textContent}`);
    }, 50);
  }, 50);
}, 50);
)");
  EXPECT_THAT(lines,
              ElementsAre("loss 60 true", "validation 3 true", "grad_norm 60 true", "lr 60 true",
                          "tokens_per_second 60 true", "seconds 60 true", "memory 60 true", "peak_share 60 true",
                          "outlier true false", "none true", "hover step 40 ·  demo 6.075 loss stands out, z 12.5",
                          "home step 1 ·  demo 4", "right step 2 ·  demo 2.5 polite",
                          "label Loss. demo: 60 values from step 1 to 60, first 4, last 1.05, least 1.05.", "rows 31",
                          "sample Once &lt;/script&gt; upon", "text step 3: careful"));
}

TEST(Page, OverlaysRuns) {
  if (!has_browser()) {
    GTEST_SKIP() << "no chromium in PATH";
  }
  const auto page = render_page({made_up("a", 1), made_up("b", 2, 80), made_up("c", 4)});
  const auto lines = told(page, std::string(kInked) + R"(
tell(`points ${chart('loss').dataset.points}`);
tell(`curves ${['--run0', '--run1', '--run2'].map((name) => inked('loss', name) > 100)}`);
tell(`differ ${[...document.querySelectorAll('#differences-table td')].map((cell) => cell.textContent)}`);
document.querySelectorAll('nav button')[1].click();
tell(`without b ${chart('loss').dataset.points} ${inked('loss', '--run1') < 20}`);
document.getElementById('logarithmic').click();
document.getElementById('smoothing').value = 0.9;
document.getElementById('smoothing').dispatchEvent(new Event('input'));
setTimeout(() => tell(`still ${chart('loss').dataset.points} ${inked('loss', '--run0') > 100}`), 50);
)");
  EXPECT_THAT(lines, ElementsAre("points 200", "curves true,true,true", "differ 1,2,4", "without b 120 true",
                                 "still 120 true"));
}

TEST(Page, ReportsRunsWithoutDifferentSettings) {
  if (!has_browser()) {
    GTEST_SKIP() << "no chromium in PATH";
  }
  const auto lines = told(render_page({made_up("a", 1), made_up("b", 1)}), R"(
tell([...document.querySelectorAll('#differences-table tbody tr')].map((row) => row.textContent).join());
)");
  EXPECT_THAT(lines, ElementsAre("none"));
}

// Each value is shown with a piece of its line. The colour shows the run, the dashes show the part.
TEST(Page, DistinguishesRunsByColourAndPartsByDashes) {
  if (!has_browser()) {
    GTEST_SKIP() << "no chromium in PATH";
  }
  auto first = made_up("a", 1), second = made_up("b", 2);
  for (auto* run : {&first, &second}) add_row(run->steps, 61, {{"parts.compute", 0.4}, {"parts.wait", 0.1}});
  const auto lines = told(render_page({first, second}), R"(
const pieces = [...chart('parts').querySelectorAll('.readout .piece')].map((piece) => piece.style.background);
tell(`pieces ${pieces.length} ${new Set(pieces).size} ${pieces.filter((text) => text.includes('gradient')).length}`);
)");
  EXPECT_THAT(lines, ElementsAre("pieces 4 4 2"));
}

TEST(Page, ShowsTheTimeBreakdownOfProfiledSteps) {
  if (!has_browser()) {
    GTEST_SKIP() << "no chromium in PATH";
  }
  auto run = made_up("demo", 1);
  run.profile = nlohmann::ordered_json::parse(R"({"first_step": 4, "last_step": 6, "ranks": [
    {"rank": 0, "compute": 0.6, "communication": 0.1, "wait": 0.2, "data": 0.06, "checkpoint": 0.04, "hidden": 0.25},
    {"rank": 1, "compute": 0.6, "communication": 0.2, "wait": 0.1, "data": 0.06, "checkpoint": 0.04, "hidden": 0.25}],
    "operations": [{"name": "aten::<mm>", "group": "", "calls": 30, "seconds": 0.3, "bytes": 0}],
    "modules": [{"name": "model.layers.*.mlp", "group": "", "calls": 6, "seconds": 0.15, "bytes": 0}],
    "collectives": [{"name": "all_gather", "group": "dp", "calls": 12, "seconds": 0.03, "bytes": 3000000}]})");
  const auto lines = told(render_page({run, made_up("plain", 2)}), R"(
const shown = document.querySelector('[data-profile=demo]'), all = (what) => [...shown.querySelectorAll(what)];
tell(document.querySelectorAll('[data-profile]').length);
tell(all('h3').map((x) => x.textContent));
const track = shown.querySelector('.bar-track').getBoundingClientRect();
tell(all('.bar')[0].querySelectorAll('.bar-part').length + ' ' + all('.bar')[0].querySelectorAll('.bar-part')[0].title);
tell([...all('.bar')[0].querySelectorAll('.bar-part')].map((x) => (x.getBoundingClientRect().width / track.width).toFixed(2)));
tell(all('tbody tr').map((row) => [...row.children].map((x) => x.textContent).join(' | ')).join(' / '));
)");
  EXPECT_THAT(lines,
              ElementsAre("1", "demo, steps 4 to 6", "5 compute 60.0 %", "0.60,0.10,0.20,0.06,0.04",
                          "0 | 200 (60.0 %) | 33.33 (10.0 %) | 66.67 (20.0 %) | 20 (6.0 %) | 13.33 (4.0 %) | 25.0 % / "
                          "1 | 200 (60.0 %) | 66.67 (20.0 %) | 33.33 (10.0 %) | 20 (6.0 %) | 13.33 (4.0 %) | 25.0 % / "
                          "aten::&lt;mm&gt; | 10 | 100 / model.layers.*.mlp | 2 | 50 / all_gather | dp | 4 | 1 | 10"));
}

TEST(Page, FitsAPhone) {
  if (!has_browser()) {
    GTEST_SKIP() << "no chromium in PATH";
  }
  const auto lines = told(render_page({made_up("demo", 1)}),
                          "setTimeout(() => tell(document.documentElement.scrollWidth <= innerWidth), 50);", "500,900");
  EXPECT_THAT(lines, ElementsAre("true"));
}

TEST(Page, ImageFileIsReplacedOnlyByAnotherImage) {
  if (!has_browser()) {
    GTEST_SKIP() << "no chromium in PATH";
  }
  const testing::TempFolder temp;
  const auto picture = picture_of(render_page({made_up("demo", 1)}), 900, 700);
  ASSERT_TRUE(picture.starts_with("\x89PNG"));
  const auto big_endian = [&](size_t at) {
    return static_cast<unsigned char>(picture[at + 2]) * 256 + static_cast<unsigned char>(picture[at + 3]);
  };
  EXPECT_EQ(big_endian(16), 900);
  EXPECT_EQ(big_endian(20), 700);
  EXPECT_GT(picture.size(), 20000u);  // a page without a curve has a few thousand bytes
  write_report(temp / "report.png", picture);
  write_report(temp / "report.png", picture);
  EXPECT_EQ(read_file(temp / "report.png"), picture);
}

TEST(Page, SupportsARunWithoutGradNorms) {
  const testing::TempFolder temp;
  std::ofstream(temp / "metrics.jsonl") << "{\"step\":1,\"loss\":1}\n";
  const auto data = nlohmann::json::parse(page_data({read_run(temp.path())}));
  EXPECT_EQ(data["runs"][0]["steps"], nlohmann::json({{"step", {1}}, {"loss", {1.0}}}));
}

TEST(ReportFile, DoesNotOverwriteOtherFiles) {
  const testing::TempFolder temp;
  std::ofstream(temp / "notes.md") << "Tessera report of last week";
  EXPECT_THROW(check_report_path(temp / "notes.md"), Error);
  write_report(temp / "report.html", render_page({made_up("demo", 1)}));
  write_report(temp / "report.html", render_page({made_up("demo", 2)}));
  std::ofstream(temp / "mine.html") << "mine";
  EXPECT_THROW(write_report(temp / "mine.html", "x"), Error);
  std::filesystem::create_symlink(temp / "report.html", temp / "link.html");
  EXPECT_THROW(write_report(temp / "link.html", "x"), Error);
  std::filesystem::create_directory(temp / "folder");
  EXPECT_THROW(write_report(temp / "folder", "x"), Error);
  EXPECT_EQ(read_file(temp / "mine.html"), "mine");
}

}  // namespace
}  // namespace tessera::report
