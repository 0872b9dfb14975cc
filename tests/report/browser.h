// A page in headless Chromium, with a script that acts like a reader of the page.
//
//   const auto lines = told(page, std::string(kInked) + "tell(inked('loss', '--run0'));");
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::report {

inline bool has_browser() { return testing::run_process({"sh", "-c", "command -v chromium"}).exit_code == 0; }

// Runs `script` at the end of the page. Returns the lines that the script gives to tell().
inline std::vector<std::string> told(const std::string& page, const std::string& script,
                                     const std::string& size = "1300,1000") {
  const testing::TempFolder temp;
  std::string with = page;
  with.insert(with.rfind("</body>"),
              "<pre id=\"told\"></pre><script>const tell = (x) => document.getElementById('told').append(x + "
              "'\\n');\nconst chart = (id) => document.querySelector(`[data-chart=${id}]`);\n" +
                  script + "</script>");
  std::ofstream(temp / "page.html", std::ios::binary) << with;
  const auto run =
      testing::run_process({"chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                            "--virtual-time-budget=4000", "--user-data-dir=" + (temp / "profile").string(),
                            "--window-size=" + size, "--dump-dom", "file://" + (temp / "page.html").string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  const std::string begin = "<pre id=\"told\">";
  const size_t at = run.out.find(begin);
  EXPECT_NE(at, run.out.npos) << run.err;
  std::vector<std::string> lines;
  if (at == run.out.npos) return lines;
  std::istringstream text(run.out.substr(at + begin.size(), run.out.find("</pre>", at) - at - begin.size()));
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

// JavaScript: inked(id, name) counts the pixels of a chart's canvas whose colour is near the colour `name` of a run.
inline constexpr const char* kInked = R"(
const inked = (id, name) => {
  const canvas = chart(id).querySelector('canvas'), all = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const probe = document.createElement('canvas').getContext('2d');
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  probe.fillRect(0, 0, 1, 1);
  const wanted = probe.getImageData(0, 0, 1, 1).data;
  let count = 0;
  for (let i = 0; i < all.length; i += 4) {
    if (all[i + 3] > 200 && [0, 1, 2].every((c) => Math.abs(all[i + c] - wanted[c]) < 40)) ++count;
  }
  return count;
};
)";

}  // namespace tessera::report
