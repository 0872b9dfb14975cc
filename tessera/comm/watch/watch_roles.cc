#include "tessera/comm/watch/watch_roles.h"

#include <fmt/format.h>

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kAnswers{2000};    // time limit for all ranks' flight records
constexpr milliseconds kLastWords{1000};  // after a broken connection: time for the failing rank's own report or end

Verdict verdict_on_lost(int rank, bool silent, milliseconds silence) {
  if (!silent) {
    return {.text = fmt::format("rank {} has ended without an error message: it was killed or it crashed", rank),
            .culprit = rank,
            .consequence = true};
  }
  return {.text = fmt::format("rank {} has sent no message for {} s: it is stopped, or its host is down or unreachable",
                              rank, silence.count() / 1000),
          .culprit = rank,
          .consequence = true};
}

}  // namespace

void WatchSpoke::receive(int, const Frame& frame) {
  if (frame.kind == FrameKind::kBye) drop(0);  // the hub leaves: this rank is no longer watched
  if (frame.kind == FrameKind::kVerdict) announce(parse_verdict(frame.text));
  if (frame.kind == FrameKind::kAsk) {
    const Trouble trouble = parse_trouble(frame.text, 0);
    send(0, {FrameKind::kStatus, rank_, to_json(listener_.where(trouble.group, trouble.sequence), RankLists::kRuns)});
  }
}

// A spoke has one connection, to rank 0. Its loss means that rank 0 is dead, and there is no hub to report that to all:
// every spoke notices it by itself and makes the same report.
void WatchSpoke::lose(int, bool silent) { announce(verdict_on_lost(0, silent, silence_)); }

WatchHub::WatchHub(milliseconds silence, bool compare, PeerListener& listener)
    : WatchLoop(0, silence, listener), compare_(compare) {}

void WatchHub::refuse_all(const std::string& why) { tell_all({FrameKind::kVerdict, 0, to_text(Verdict{.text = why})}); }

void WatchHub::receive(int from, const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::kBye:
      if (from == 0) tell_all(frame);
      left_.insert(from);
      drop(from);
      break;
    case FrameKind::kFailed:
      settle({.text = fmt::format("rank {} failed: {}", from, frame.text), .culprit = from, .consequence = true});
      break;
    case FrameKind::kTrouble:
      inquire(from, parse_trouble(frame.text, from));
      break;
    case FrameKind::kStatus:
      if (inquiry_) {
        inquiry_->answers[from] = parse_flight_record(frame.text, fmt::format("the answer of rank {}", from));
      }
      break;
    default:
      break;
  }
}

void WatchHub::lose(int rank, bool silent) { settle(verdict_on_lost(rank, silent, silence_)); }

// Starts an inquiry for the first trouble and asks all ranks for their records. Later reports join it: a failed
// collective is usually reported by all its ranks. One time-out among them is enough to treat it as a time-out.
void WatchHub::inquire(int rank, Trouble trouble) {
  if (verdict_) return;
  if (inquiry_) {
    inquiry_->trouble.timed_out |= trouble.timed_out;
    return;
  }
  inquiry_ = Inquiry{.trouble = std::move(trouble), .rank = rank, .begun = Clock::now(), .answers = {}};
  if (!compare_) return;
  inquiry_->answers[0] = listener_.where(inquiry_->trouble.group, inquiry_->trouble.sequence);
  tell_all({FrameKind::kAsk, 0, to_text(inquiry_->trouble)});
}

// Ends an inquiry when all records have arrived or the time limit has passed. peers() + 1: all connected ranks and rank
// 0.
void WatchHub::on_tick() {
  if (!inquiry_ || verdict_) return;
  const auto waited = Clock::now() - inquiry_->begun;
  const bool complete = !compare_ || inquiry_->answers.size() == peers() + 1;
  if (!complete && waited < kAnswers) return;
  // A connection usually breaks because a rank ends. That rank's end or error explains more than the records of the
  // others, so it is given time to arrive.
  if (!inquiry_->trouble.timed_out && waited < kLastWords) return;
  std::vector<FlightRecord> records;
  for (const auto& [rank, record] : inquiry_->answers) records.push_back(record);
  settle(judge(records, left_, inquiry_->trouble, inquiry_->rank));
}

// Makes `verdict` the failure report, unless there is one: all ranks must receive the same one.
void WatchHub::settle(const Verdict& verdict) {
  if (verdict_) return;
  verdict_ = verdict;
  tell_all({FrameKind::kVerdict, 0, to_text(verdict)});
  announce(verdict);
}

}  // namespace tessera::comm
