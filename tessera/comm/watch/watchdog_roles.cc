#include "tessera/comm/watch/watchdog_roles.h"

#include <fmt/format.h>

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kRecordsTimeout{2000};  // time limit for all ranks' flight records
// When a collective has failed by a broken connection: time for the failing rank to report its own error or to end.
constexpr milliseconds kRankEndTimeout{1000};

FailureReport report_for_lost_rank(int rank, bool silent, milliseconds silence) {
  if (!silent) {
    return {.text = fmt::format("rank {} has ended without an error message: it was killed or it crashed", rank),
            .culprit = rank,
            .is_consequence = true};
  }
  return {.text = fmt::format("rank {} has sent no message for {} s: it is stopped, or its host is down or unreachable",
                              rank, silence.count() / 1000),
          .culprit = rank,
          .is_consequence = true};
}

}  // namespace

void WatchdogSpoke::receive(int, const WatchdogFrame& frame) {
  if (frame.kind == WatchdogFrameKind::kBye) drop(0);  // the hub leaves: this rank is no longer watched
  if (frame.kind == WatchdogFrameKind::kFailureReport) deliver_report(parse_failure_report(frame.text));
  if (frame.kind == WatchdogFrameKind::kRecordRequest) {
    const CallFailure failure = parse_call_failure(frame.text, 0);
    send(0, {WatchdogFrameKind::kRecord, rank_,
             to_json(listener_.recent_calls(failure.group, failure.sequence), RankLists::kRuns)});
  }
}

// A spoke has one connection, to rank 0. Its loss means that rank 0 is dead, and there is no hub to report that to all:
// every spoke notices it by itself and makes the same report.
void WatchdogSpoke::on_lost_peer(int, bool silent) { deliver_report(report_for_lost_rank(0, silent, silence_)); }

WatchdogHub::WatchdogHub(milliseconds silence, bool compare, FailureListener& listener)
    : WatchdogLoop(0, silence, listener), compare_(compare) {}

void WatchdogHub::refuse_all(const std::string& why) {
  send_to_all({WatchdogFrameKind::kFailureReport, 0, to_text(FailureReport{.text = why})});
}

void WatchdogHub::receive(int from, const WatchdogFrame& frame) {
  switch (frame.kind) {
    case WatchdogFrameKind::kBye:
      if (from == 0) send_to_all(frame);
      left_.insert(from);
      drop(from);
      break;
    case WatchdogFrameKind::kFailed:
      publish_report(
          {.text = fmt::format("rank {} failed: {}", from, frame.text), .culprit = from, .is_consequence = true});
      break;
    case WatchdogFrameKind::kCallFailure:
      start_cause_search(from, parse_call_failure(frame.text, from));
      break;
    case WatchdogFrameKind::kRecord:
      if (search_) {
        search_->answers[from] = parse_flight_record(frame.text, fmt::format("the answer of rank {}", from));
      }
      break;
    default:
      break;
  }
}

void WatchdogHub::on_lost_peer(int rank, bool silent) { publish_report(report_for_lost_rank(rank, silent, silence_)); }

// Starts a search for the cause of the first reported failure and asks all ranks for their flight records. Later
// reports join this search: a failed collective is usually reported by all its ranks. If one of the reports is a
// time-out, the failure is treated as a time-out.
void WatchdogHub::start_cause_search(int rank, CallFailure failure) {
  if (report_) return;
  if (search_) {
    search_->failure.timed_out |= failure.timed_out;
    return;
  }
  search_ = CauseSearch{.failure = std::move(failure), .rank = rank, .begun = Clock::now(), .answers = {}};
  if (!compare_) return;
  search_->answers[0] = listener_.recent_calls(search_->failure.group, search_->failure.sequence);
  send_to_all({WatchdogFrameKind::kRecordRequest, 0, to_text(search_->failure)});
}

// Ends the search for the cause of a failure and publishes the failure report. With `compare_` the search lasts until
// rank 0 and all connected ranks have given their flight records, or kRecordsTimeout has passed. If the failure is not
// a time-out, the search lasts at least kRankEndTimeout.
void WatchdogHub::on_tick() {
  if (!search_ || report_) return;
  const auto waited = Clock::now() - search_->begun;
  const bool complete = !compare_ || search_->answers.size() == peers() + 1;
  if (!complete && waited < kRecordsTimeout) return;
  // If a collective fails without a time-out, its connection usually broke because a rank ended. The end or the error
  // of that rank explains more than the flight records of the other ranks. So that this news can arrive, the hub makes
  // no report from the flight records before kRankEndTimeout has passed.
  if (!search_->failure.timed_out && waited < kRankEndTimeout) return;
  std::vector<FlightRecord> records;
  for (const auto& [rank, record] : search_->answers) records.push_back(record);
  publish_report(make_failure_report(records, left_, search_->failure, search_->rank));
}

// Makes `report` the failure report, unless there is one: all ranks must receive the same one.
void WatchdogHub::publish_report(const FailureReport& report) {
  if (report_) return;
  report_ = report;
  send_to_all({WatchdogFrameKind::kFailureReport, 0, to_text(report)});
  deliver_report(report);
}

}  // namespace tessera::comm
