// The files that `tessera report` writes: a page, or a picture of one.
//
//   write_report("report.html", render_page(runs));
//   write_report("report.png", picture_of(page, 1400, 1200));
//
// A file that is there already is replaced only if a report is what it holds. No communication.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tessera::report {

// Error kConfig where PATH holds something that is no report.
void check_report_path(const std::filesystem::path& path);
// Appears whole or not at all. Errors as check_report_path's; kIo.
void write_report(const std::filesystem::path& path, std::string_view content);

// The page's charts as a PNG, drawn by a Chromium without a window: the one in TESSERA_CHROMIUM, else chromium,
// chromium-browser, google-chrome or chrome in PATH. Width and height in pixels. Error kConfig where there is none,
// kIo where it draws nothing within 60 s.
std::string picture_of(std::string_view page, int width, int height);

}  // namespace tessera::report
