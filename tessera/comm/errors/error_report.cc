#include "tessera/comm/errors/error_report.h"

#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/json.h"
#include "tessera/comm/errors/peer_failed.h"

namespace tessera::comm {
namespace {

constexpr JsonLimits kReportLimits{.max_bytes = size_t{1} << 20, .max_depth = 16, .max_keys = 1000};

}  // namespace

bool report_error(const std::exception& error) noexcept {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (!path || !*path) return false;
  try {
    // torchrun takes the report with the earliest time, in whole seconds, as the root cause. The error of a rank that
    // failed because of another rank is therefore dated 5 s later.
    const bool consequence = dynamic_cast<const PeerFailed*>(&error) != nullptr;
    const auto time = std::chrono::system_clock::now().time_since_epoch() + std::chrono::seconds(consequence ? 5 : 0);
    const std::string message = first_line(error);
    const nlohmann::json extra = {
        {"py_callstack", message},
        {"timestamp", std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count())},
        {"consequence", consequence}};
    const nlohmann::json report = {{"message", {{"message", message}, {"extraInfo", extra}}}};
    publish_file(path, report.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  } catch (...) {  // the caller prints the message to stderr
    return false;
  }
  // Tests whether Tessera's launcher started this process, with no torchrun in between, as
  // started_by_tessera_launcher() in comm/rendezvous does.
  const char *run = std::getenv("TORCHELASTIC_RUN_ID"), *ours = std::getenv("TESSERA_LAUNCH_ID");
  return std::getenv("TESSERA_RENDEZVOUS") && (!run || (ours && std::string_view(run) == ours));
}

std::optional<ErrorReport> read_error_report(const std::filesystem::path& path) {
  try {
    const Json json = parse_json_object(read_file(path, kReportLimits.max_bytes), path.string(), kReportLimits);
    const JsonReader message = JsonReader(json, path.string()).at("message");
    if (!message.is_object()) return ErrorReport{.message = message.as_string()};
    ErrorReport result{.message = message.string("message")};
    const auto extra = message.find("extraInfo");
    if (extra && extra->is_object()) result.consequence = extra->boolean("consequence", false);
    return result;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace tessera::comm
