#include "tessera/comm/watch/peers.h"

#include "tessera/comm/errors/peer_failed.h"
#include "tessera/comm/watch/diagnosis.h"

namespace tessera::comm {

void throw_verdict(const Verdict& verdict, const std::string& before) {
  const std::string message = before + verdict.text + ".";
  if (verdict.consequence) throw PeerFailed(message);
  throw Error(ErrorKind::kComm, message);
}

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
