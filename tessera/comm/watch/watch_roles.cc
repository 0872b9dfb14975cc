#include "tessera/comm/watch/watch_roles.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tessera/base/text/json.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr milliseconds kAnswers{2000};    // for all ranks to say where they are
constexpr milliseconds kLastWords{1000};  // for a rank that broke a connection to be seen to end
constexpr JsonLimits kWordLimits{.max_bytes = size_t{1} << 20, .max_depth = 1, .max_keys = 64};

std::string text_of(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

Verdict verdict_on_lost(int rank, bool silent, milliseconds silence) {
  if (!silent) {
    return {.text = fmt::format("rank {} has ended without a word: it was killed or it crashed", rank),
            .culprit = rank,
            .consequence = true};
  }
  return {
      .text = fmt::format("rank {} has not been heard of for {} s: it is stopped, or its host is down or unreachable",
                          rank, silence.count() / 1000),
      .culprit = rank,
      .consequence = true};
}

}  // namespace

Trouble parse_trouble(const std::string& text, int from) {
  const std::string where = fmt::format("[comm.watchdog] the trouble of rank {}", from);
  const Json json = parse_json_object(text, where, kWordLimits);
  const JsonReader said(json, where, ErrorKind::kComm);
  return {.group = static_cast<uint32_t>(said.integer("group", std::nullopt, 0, UINT32_MAX)),
          .sequence = said.at("sequence").as_unsigned(),
          .text = said.string("text"),
          .timed_out = said.boolean("timed_out")};
}

Verdict parse_verdict(const std::string& text) {
  const std::string where = "[comm.watchdog] the verdict of rank 0";
  const Json json = parse_json_object(text, where, kWordLimits);
  const JsonReader said(json, where, ErrorKind::kComm);
  return {.text = said.string("text"),
          .culprit = static_cast<int>(said.integer("culprit", std::nullopt, -1, INT32_MAX)),
          .consequence = said.boolean("consequence")};
}

std::string to_text(const Trouble& trouble) {
  return text_of({{"group", trouble.group},
                  {"sequence", trouble.sequence},
                  {"text", trouble.text},
                  {"timed_out", trouble.timed_out}});
}

std::string to_text(const Verdict& verdict) {
  return text_of({{"text", verdict.text}, {"culprit", verdict.culprit}, {"consequence", verdict.consequence}});
}

void WatchSpoke::receive(int, const Frame& frame) {
  if (frame.kind == FrameKind::kBye) drop(0);  // nobody is left to watch over us
  if (frame.kind == FrameKind::kVerdict) announce(parse_verdict(frame.text));
  if (frame.kind == FrameKind::kAsk) {
    const Trouble trouble = parse_trouble(frame.text, 0);
    send(0, {FrameKind::kStatus, rank_, to_json(listener_.where(trouble.group, trouble.sequence), RankLists::kRuns)});
  }
}

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

void WatchHub::on_tick() {
  if (!inquiry_ || verdict_) return;
  const auto waited = Clock::now() - inquiry_->begun;
  const bool complete = !compare_ || inquiry_->answers.size() == peers() + 1;
  if (!complete && waited < kAnswers) return;
  // A connection that broke is most often that of a rank which ends: its end says more than what the others see.
  if (!inquiry_->trouble.timed_out && waited < kLastWords) return;
  std::vector<FlightRecord> records;
  for (const auto& [rank, record] : inquiry_->answers) records.push_back(record);
  settle(judge(records, left_, inquiry_->trouble, inquiry_->rank));
}

void WatchHub::settle(const Verdict& verdict) {
  if (verdict_) return;
  verdict_ = verdict;
  tell_all({FrameKind::kVerdict, 0, to_text(verdict)});
  announce(verdict);
}

}  // namespace tessera::comm
