#include "tessera/comm/watch/peers.h"

#include <nlohmann/json.hpp>

#include "tessera/base/text/json_numbers.h"
#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/watch/diagnosis.h"

namespace tessera::comm {
namespace {

constexpr JsonLimits kWordLimits{.max_bytes = size_t{1} << 20, .max_depth = 1, .max_keys = 64};

}  // namespace

// The texts come from another process over the network: their size and depth are limited, and errors name the sender.
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
  return dump_json({{"group", trouble.group},
                    {"sequence", trouble.sequence},
                    {"text", trouble.text},
                    {"timed_out", trouble.timed_out}});
}

std::string to_text(const Verdict& verdict) {
  return dump_json({{"text", verdict.text}, {"culprit", verdict.culprit}, {"consequence", verdict.consequence}});
}

void throw_verdict(const Verdict& verdict, const std::string& before) {
  const std::string message = before + verdict.text + ".";
  if (verdict.consequence) throw PeerFailed(message);
  throw Error(ErrorKind::kComm, message);
}

// A diagnosis that names the cause (disagreement, dead rank) is the report. An absent rank or a deadlock counts only
// after a time-out: when a connection broke, ranks are absent because they failed. In all other cases the observation
// of the reporting rank is the report.
Verdict judge(const std::vector<FlightRecord>& records, const std::set<int>& left, const Trouble& trouble, int rank) {
  const Diagnosis found = diagnose(records, left);
  Verdict verdict{.text = found.text, .culprit = found.culprit, .consequence = false};
  switch (found.fault) {
    case Fault::kDisagreement:
      verdict.text += ". All ranks of a group must make the same calls in the same order";
      return verdict;
    case Fault::kSilent:
    case Fault::kLeft:
      verdict.consequence = true;
      return verdict;
    case Fault::kAbsent:
    case Fault::kDeadlock:
      if (trouble.timed_out) return verdict;
      break;
    case Fault::kNone:
    case Fault::kAllInside:
      break;
  }
  verdict = {
      .text = fmt::format("rank {} reports: {}", rank, trouble.text), .culprit = -1, .consequence = !trouble.timed_out};
  if (found.fault == Fault::kAllInside && trouble.timed_out) verdict.text += "; " + found.text;
  return verdict;
}

}  // namespace tessera::comm
