#include "tessera/comm/watch/failure_reporter.h"

#include <nlohmann/json.hpp>

#include "tessera/base/text/json_numbers.h"
#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/watch/diagnosis.h"

namespace tessera::comm {
namespace {

constexpr JsonLimits kFrameTextLimits{.max_bytes = size_t{1} << 20, .max_depth = 1, .max_keys = 64};

}  // namespace

// parse_call_failure() and parse_failure_report() read JSON that another process sent over the network: its size and
// depth are limited, and errors name the sender.
CallFailure parse_call_failure(const std::string& text, int from) {
  const std::string where = fmt::format("[comm.watchdog] the trouble of rank {}", from);
  const Json json = parse_json_object(text, where, kFrameTextLimits);
  const JsonReader fields(json, where, ErrorKind::kComm);
  return {.group = static_cast<uint32_t>(fields.integer("group", std::nullopt, 0, UINT32_MAX)),
          .sequence = fields.at("sequence").as_unsigned(),
          .text = fields.string("text"),
          .timed_out = fields.boolean("timed_out")};
}

FailureReport parse_failure_report(const std::string& text) {
  const std::string where = "[comm.watchdog] the verdict of rank 0";
  const Json json = parse_json_object(text, where, kFrameTextLimits);
  const JsonReader fields(json, where, ErrorKind::kComm);
  return {.text = fields.string("text"),
          .culprit = static_cast<int>(fields.integer("culprit", std::nullopt, -1, INT32_MAX)),
          .is_consequence = fields.boolean("consequence")};
}

std::string to_text(const CallFailure& failure) {
  return dump_json({{"group", failure.group},
                    {"sequence", failure.sequence},
                    {"text", failure.text},
                    {"timed_out", failure.timed_out}});
}

std::string to_text(const FailureReport& report) {
  return dump_json({{"text", report.text}, {"culprit", report.culprit}, {"consequence", report.is_consequence}});
}

void throw_failure_report(const FailureReport& report, const std::string& before) {
  const std::string message = before + report.text + ".";
  if (report.is_consequence) throw PeerFailed(message);
  throw Error(ErrorKind::kComm, message);
}

// Chooses the text of the failure report. If the diagnosis finds a disagreement or a dead rank, the diagnosis is the
// report. If it finds an absent rank or a deadlock, it is the report only after a time-out: when a connection broke,
// ranks are absent because they failed. In all other cases the report is what rank `rank` observed (`failure`).
FailureReport make_failure_report(const std::vector<FlightRecord>& records, const std::set<int>& left,
                                  const CallFailure& failure, int rank) {
  const Diagnosis found = diagnose(records, left);
  FailureReport report{.text = found.text, .culprit = found.culprit, .is_consequence = false};
  switch (found.cause) {
    case HangCause::kDisagreement:
      report.text += ". All ranks of a group must make the same calls in the same order";
      return report;
    case HangCause::kSilent:
    case HangCause::kLeft:
      report.is_consequence = true;
      return report;
    case HangCause::kAbsent:
    case HangCause::kDeadlock:
      if (failure.timed_out) return report;
      break;
    case HangCause::kNone:
    case HangCause::kAllInside:
      break;
  }
  report = {.text = fmt::format("rank {} reports: {}", rank, failure.text),
            .culprit = -1,
            .is_consequence = !failure.timed_out};
  if (found.cause == HangCause::kAllInside && failure.timed_out) report.text += "; " + found.text;
  return report;
}

}  // namespace tessera::comm
