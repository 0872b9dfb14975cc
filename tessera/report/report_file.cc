#include "tessera/report/report_file.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/scratch_folder.h"
#include "tessera/base/files/staged.h"
#include "tessera/formats/torch/crc32.h"

extern char** environ;

namespace tessera::report {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kReportMark = "Tessera report";  // each report has it near its beginning
constexpr std::string_view kPngSignature = "\x89PNG\r\n\x1a\n";
constexpr size_t kPngHeader = 8 + 25;  // bytes of the signature and the IHDR chunk

// Type and content of the PNG chunk that marks a picture as a report: a tEXt chunk with the keyword Software.
std::string png_text() { return std::string("tEXtSoftware") + '\0' + std::string(kReportMark); }

bool is_report(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string head(4096, '\0');
  file.read(head.data(), static_cast<std::streamsize>(head.size()));
  head.resize(static_cast<size_t>(file.gcount()));
  const bool page = head.starts_with("<!DOCTYPE html>") &&
                    head.find(fmt::format("<meta name=\"generator\" content=\"{}\">", kReportMark)) != head.npos;
  const bool picture = head.starts_with(kPngSignature) && head.find(png_text()) == kPngHeader + 4;
  return page || picture;
}

std::optional<fs::path> find_browser() {
  if (const char* given = std::getenv("TESSERA_CHROMIUM"); given && *given) return given;
  const char* path = std::getenv("PATH");
  std::string_view left = path ? path : "";
  // "chromium" in any folder of PATH is preferred to "chromium-browser" in its first folder, and so on for the other
  // names.
  for (const char* name : {"chromium", "chromium-browser", "google-chrome", "chrome"}) {
    for (std::string_view rest = left; !rest.empty();) {
      const size_t end = std::min(rest.find(':'), rest.size());
      const auto candidate = fs::path(rest.substr(0, end)) / name;
      if (::access(candidate.c_str(), X_OK) == 0 && fs::is_regular_file(candidate)) return candidate;
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
  return std::nullopt;
}

// Runs a program with its output in `log`. Returns its wait status. If the program does not end within `limit`, kills
// its process group, because Chromium starts further processes, and returns nullopt.
std::optional<int> run_command(const std::vector<std::string>& command, const fs::path& log,
                               std::chrono::seconds limit) {
  std::vector<char*> arguments;
  for (const auto& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, command.front().c_str(), &actions, &attributes, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  TESSERA_CHECK(error == 0, ErrorKind::kIo, "[report.picture] {}: {}", command.front(), std::strerror(error));
  const auto end = std::chrono::steady_clock::now() + limit;
  int status = 0;
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) {
      ::kill(-pid, SIGKILL);
      ::waitpid(pid, &status, 0);
      return std::nullopt;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return status;
}

std::string big_endian(uint32_t value) {
  std::string out(4, '\0');
  for (int byte = 0; byte < 4; ++byte) out[static_cast<size_t>(byte)] = static_cast<char>(value >> (24 - 8 * byte));
  return out;
}

// The PNG with a tEXt chunk after its header, which marks it as a report. A chunk is: size of the content, type,
// content, CRC of type and content.
std::string with_report_mark(const std::string& png) {
  TESSERA_CHECK(png.size() > kPngHeader && png.starts_with(kPngSignature), ErrorKind::kIo,
                "[report.picture] the browser wrote {} bytes that are no PNG. Check that it runs without this program.",
                png.size());
  const std::string body = png_text();
  const auto sum = crc32(0, std::as_bytes(std::span(body)));
  return png.substr(0, kPngHeader) + big_endian(static_cast<uint32_t>(body.size() - 4)) + body + big_endian(sum) +
         png.substr(kPngHeader);
}

}  // namespace

void check_report_path(const fs::path& path) {
  const auto status = fs::symlink_status(path);
  TESSERA_CHECK(!fs::exists(status) || (fs::is_regular_file(status) && is_report(path)), ErrorKind::kConfig,
                "[report.write] {}: exists and is no report, so it is not replaced. Give another file with -o.",
                path.string());
}

void write_report(const fs::path& path, std::string_view content) {
  check_report_path(path);
  publish_file(path, content);
}

std::string picture_of(std::string_view page, int width, int height) {
  const auto browser = find_browser();
  TESSERA_CHECK(browser, ErrorKind::kConfig,
                "[report.picture] --png needs Chromium, but PATH has none. Install it (Debian: package chromium), or "
                "set TESSERA_CHROMIUM to its path.");
  // Page, log and the browser's profile are in a scratch folder: the browser does not touch the user's profile.
  const ScratchFolder scratch("report.picture");
  const auto html = scratch / "page.html", png = scratch / "page.png", log = scratch / "log";
  publish_file(html, page);
  std::vector<std::string> command = {browser->string(),
                                      "--headless",
                                      "--disable-gpu",
                                      "--hide-scrollbars",
                                      "--no-first-run",
                                      "--disable-dev-shm-usage",
                                      "--user-data-dir=" + (scratch / "profile").string(),
                                      "--virtual-time-budget=5000",
                                      fmt::format("--window-size={},{}", width, height),
                                      "--screenshot=" + png.string()};
  // Chromium refuses to run as root with its sandbox, so the sandbox is switched off for root. This is safe, because
  // this program makes the page and the page loads nothing else.
  if (::geteuid() == 0) command.emplace_back("--no-sandbox");
  command.push_back("file://" + html.string() + "#picture");
  const auto code = run_command(command, log, std::chrono::seconds(60));
  std::error_code ignored;
  TESSERA_CHECK(code && *code == 0 && fs::exists(png, ignored), ErrorKind::kIo, "[report.picture] {}: {}{}",
                browser->string(),
                code ? fmt::format("ended with {}", WIFEXITED(*code) ? WEXITSTATUS(*code) : 128 + WTERMSIG(*code))
                     : "drew nothing within 60 s",
                fs::exists(log, ignored) && fs::file_size(log) > 0 ? ": " + read_file(log).substr(0, 300) : "");
  return with_report_mark(read_file(png));
}

}  // namespace tessera::report
