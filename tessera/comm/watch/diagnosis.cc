#include "tessera/comm/watch/diagnosis.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>

namespace tessera::comm {
namespace {

bool is_open(const FlightCall& call) { return call.state == CallState::kStarted || call.state == CallState::kWaiting; }

std::string name_of(const FlightCall& call) {
  const Signature& signature = call.signature;
  return fmt::format("{} ({} {} of group '{}')", to_string(signature), is_message(signature.op) ? "message" : "call",
                     signature.sequence, signature.group);
}

std::string ranks_text(const std::set<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", list_ranks(ranks));
}

double seconds_before(const FlightRecord& record, int64_t moment_us) {
  return static_cast<double>(record.written_us - moment_us) / 1e6;
}

// Returns the call that delays a rank: the first call that it waits in or that failed, otherwise the oldest call that
// has started and not ended; null when there is none.
const FlightCall* open_call(const FlightRecord& record) {
  const FlightCall* found = nullptr;
  for (const FlightCall& call : record.calls) {
    if (call.state == CallState::kWaiting || call.state == CallState::kFailed) return &call;
    if (!found && call.state == CallState::kStarted) found = &call;
  }
  return found;
}

// The search for the cause, in three steps:
// 1. Two ranks made different calls under one number of a group: a disagreement.
// 2. follow(): "rank A waits for rank B" is an edge of a graph, because A's open call needs B and B has not made it. A
//    rank that is waited for and waits for no rank is the cause. If there is none, every path leads into a cycle: a
//    deadlock.
// 3. Otherwise no rank waits for another one: all ranks have made the call.
class HangDiagnoser {
 public:
  HangDiagnoser(const std::vector<FlightRecord>& records, const std::set<int>& left) : left_(left) {
    for (const FlightRecord& record : records) {
      records_[record.rank] = &record;
      for (const FlightGroup& group : record.groups) groups_.emplace(group.id, &group);
      for (const FlightCall& call : record.calls) {
        if (!is_message(call.signature.op)) last_[{record.rank, call.signature.members}] = &call;
      }
    }
  }

  Diagnosis run() const {
    if (auto found = disagreement_of_any_group()) return *found;
    std::set<int> waiting;
    for (const auto& [rank, record] : records_) {
      if (open_call(*record)) waiting.insert(rank);
    }
    if (waiting.empty()) return {.cause = HangCause::kNone, .culprit = -1, .text = "no call is under way"};
    for (const int rank : waiting) {
      if (auto found = follow(rank)) return *found;
    }
    const FlightRecord& first = *records_.at(*waiting.begin());
    return {.cause = HangCause::kAllInside,
            .culprit = -1,
            .text = fmt::format("all ranks have made {}, which does not end: a connection or a rank in it is stuck",
                                name_of(*open_call(first)))};
  }

 private:
  // Compares the calls that ranks made under each sequence number of each group. Of several calls on which ranks
  // differ, the one that started first is returned.
  std::optional<Diagnosis> disagreement_of_any_group() const {
    std::map<std::pair<uint32_t, uint64_t>, std::vector<std::pair<int, const FlightCall*>>> made;
    for (const auto& [rank, record] : records_) {
      for (const FlightCall& call : record->calls) {
        if (!is_message(call.signature.op)) {
          made[{call.signature.members, call.signature.sequence}].emplace_back(rank, &call);
        }
      }
    }
    const std::pair<int, const FlightCall*>*first = nullptr, *other = nullptr;
    for (const auto& [number, calls] : made) {
      const auto differs = std::ranges::find_if(calls, [&first_call = calls.front()](const auto& call) {
        return call.second->signature.hash != first_call.second->signature.hash;
      });
      if (differs == calls.end() || (first && first->second->started_us <= calls.front().second->started_us)) continue;
      first = &calls.front();
      other = &*differs;
    }
    if (!first) return std::nullopt;
    const Signature &one = first->second->signature, &two = other->second->signature;
    return Diagnosis{
        .cause = HangCause::kDisagreement,
        .culprit = -1,
        .text = fmt::format("the ranks disagree on call {} of group '{}': rank {} calls {}, rank {} {}", one.sequence,
                            one.group, first->first, to_string(one), other->first, to_string(two))};
  }

  const FlightCall* last_collective(int rank, uint32_t group) const {
    const auto found = last_.find({rank, group});
    return found == last_.end() ? nullptr : found->second;
  }

  // Whether `rank` has made the call with this signature. A rank makes its collectives of a group in order. So `rank`
  // has made a collective if the sequence number of its last collective in the group is at least that of `signature`.
  // For a message, the matching call of `rank` has the same hash and the opposite operation: a receive for a send, a
  // send for a receive.
  bool has_made(int rank, const Signature& signature) const {
    if (!is_message(signature.op)) {
      const FlightCall* last = last_collective(rank, signature.members);
      return last && last->signature.sequence >= signature.sequence;
    }
    const auto& calls = records_.at(rank)->calls;
    return std::ranges::any_of(calls, [&](const FlightCall& call) {
      return call.signature.hash == signature.hash && call.signature.op != signature.op;
    });
  }

  // The ranks that `rank` waits for: the members of its open call that have not made the call. Ranks without a record
  // come first.
  std::vector<int> awaited(int rank) const {
    const FlightCall* call = open_call(*records_.at(rank));
    const auto group = call ? groups_.find(call->signature.members) : groups_.end();
    if (group == groups_.end()) return {};
    const std::vector<int>& members = group->second->ranks;
    if (is_message(call->signature.op)) {
      const int peer = members.at(static_cast<size_t>(call->signature.root) % members.size());
      return peer == rank ? std::vector<int>() : not_there({peer}, call->signature);
    }
    const auto key = std::pair(call->signature.members, call->signature.sequence);
    auto known = not_there_.find(key);
    if (known == not_there_.end()) known = not_there_.emplace(key, not_there(members, call->signature)).first;
    std::vector<int> others = known->second;
    std::erase(others, rank);
    return others;
  }

  std::vector<int> not_there(const std::vector<int>& members, const Signature& signature) const {
    std::vector<int> silent, behind;
    for (const int member : members) {
      if (!records_.contains(member)) {
        silent.push_back(member);
      } else if (!has_made(member, signature)) {
        behind.push_back(member);
      }
    }
    silent.insert(silent.end(), behind.begin(), behind.end());
    return silent;
  }

  // Breadth-first search from `start` over the ranks that are waited for, directly or indirectly. The first rank found
  // that waits for no rank, or has no record, is the cause. Otherwise each rank found waits for another one found, so a
  // walk along the first edges must return to a rank that it has visited: a deadlock. Returns nullopt when `start`
  // waits for no rank.
  std::optional<Diagnosis> follow(int start) const {
    std::vector<int> found = {start};
    std::set<int> seen = {start};
    for (size_t i = 0; i < found.size(); ++i) {
      for (const int next : awaited(found[i])) {
        if (!seen.insert(next).second) continue;
        if (!records_.contains(next) || awaited(next).empty()) return absent(next, found[i]);
        found.push_back(next);
      }
    }
    if (found.size() == 1) return std::nullopt;
    std::vector<int> path = {start};
    for (;;) {
      const int next = awaited(path.back()).front();
      const auto again = std::ranges::find(path, next);
      if (again != path.end()) return deadlock({again, path.end()});
      path.push_back(next);
    }
  }

  Diagnosis absent(int culprit, int waiter) const {
    const FlightCall& call = *open_call(*records_.at(waiter));
    std::set<int> waiters;
    for (const auto& [rank, record] : records_) {
      const FlightCall* open = open_call(*record);
      if (open && open->signature.hash == call.signature.hash && rank != culprit) waiters.insert(rank);
    }
    const std::string who = ranks_text(waiters);
    if (left_.contains(culprit)) {
      return {.cause = HangCause::kLeft,
              .culprit = culprit,
              .text = fmt::format("rank {} has left the run, but {} wait for it in {}", culprit, who, name_of(call))};
    }
    if (!records_.contains(culprit)) {
      return {.cause = HangCause::kSilent,
              .culprit = culprit,
              .text = fmt::format(
                  "rank {} did not answer: it was killed, is stopped, or its host cannot be reached; {} wait in {}",
                  culprit, who, name_of(call))};
    }
    const FlightRecord& record = *records_.at(culprit);
    const FlightCall* last = last_collective(culprit, call.signature.members);
    std::string history = "it has made no call of this group";
    if (last) {
      history = fmt::format("its last call of this group is {}, {} {:.1f} s ago", name_of(*last),
                            is_open(*last) ? "begun" : "ended",
                            seconds_before(record, is_open(*last) ? last->started_us : last->finished_us));
    }
    return {.cause = HangCause::kAbsent,
            .culprit = culprit,
            .text = fmt::format("rank {} has not made {}, in which {} wait; {}", culprit, name_of(call), who, history)};
  }

  Diagnosis deadlock(const std::vector<int>& circle) const {
    std::string text = fmt::format("{} wait for one another", ranks_text({circle.begin(), circle.end()}));
    for (size_t i = 0; i < std::min<size_t>(circle.size(), 4); ++i) {
      text += fmt::format("{} rank {} in {}", i ? "," : ":", circle[i], name_of(*open_call(*records_.at(circle[i]))));
    }
    return {.cause = HangCause::kDeadlock, .culprit = -1, .text = text};
  }

  const std::set<int>& left_;
  std::map<int, const FlightRecord*> records_;
  std::map<uint32_t, const FlightGroup*> groups_;
  std::map<std::pair<int, uint32_t>, const FlightCall*> last_;  // collective of a rank in a group
  // Cache of not_there(), by group and number of the collective: thousands of ranks may wait in the same call.
  mutable std::map<std::pair<uint32_t, uint64_t>, std::vector<int>> not_there_;
};

}  // namespace

std::string list_ranks(const std::set<int>& ranks) {
  constexpr size_t kShown = 8;
  const auto end = std::next(ranks.begin(), static_cast<std::ptrdiff_t>(std::min(ranks.size(), kShown)));
  const std::string more = ranks.size() > kShown ? fmt::format(" and {} more", ranks.size() - kShown) : "";
  return fmt::format("{}{}", fmt::join(ranks.begin(), end, ", "), more);
}

Diagnosis diagnose(const std::vector<FlightRecord>& records, const std::set<int>& left) {
  return HangDiagnoser(records, left).run();
}

std::string describe_open_call(const FlightRecord& record) {
  if (record.calls.empty()) return fmt::format("rank {} has made no call", record.rank);
  const FlightCall* call = open_call(record);
  if (!call) {
    const FlightCall& last = record.calls.back();
    return fmt::format("rank {} is in no call; its last one, {}, ended {:.1f} s before", record.rank, name_of(last),
                       seconds_before(record, last.finished_us));
  }
  const char* what = call->state == CallState::kWaiting  ? "waits"
                     : call->state == CallState::kFailed ? "failed"
                                                         : "computes during";
  return fmt::format("rank {} {}{} {}, begun {:.1f} s before", record.rank, what,
                     call->state == CallState::kStarted ? "" : " in", name_of(*call),
                     seconds_before(record, call->started_us));
}

}  // namespace tessera::comm
