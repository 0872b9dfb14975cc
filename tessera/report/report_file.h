// The output files of `tessera report`: an HTML page, or a picture of a page.
//
//   write_report("report.html", render_page(runs));
//   write_report("report.png", picture_of(page, 1400, 1200));
//
// An existing file is replaced only if it is a report. No communication.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tessera::report {

// Checks that a report may be written to `path`: Error kConfig if `path` exists and is not a report of this program.
void check_report_path(const std::filesystem::path& path);
// Writes the file; it appears completely or not at all. Errors as check_report_path(); kIo.
void write_report(const std::filesystem::path& path, std::string_view content);

// A PNG of the charts of a page, drawn by a headless Chromium: the program that TESSERA_CHROMIUM names, else chromium,
// chromium-browser, google-chrome or chrome in PATH. `width` and `height` in pixels. Error kConfig if there is no
// Chromium, kIo if it fails or draws nothing within 60 s.
std::string picture_of(std::string_view page, int width, int height);

}  // namespace tessera::report
