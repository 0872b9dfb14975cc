// Finds out why ranks wait, and which rank is the cause, from the flight records of all ranks at one moment.
//
//   const Diagnosis diagnosis = diagnose(records);
//   log_error("{}", diagnosis.text);        // "rank 1 has not made call 8 of group 'world', all_reduce(sum) of ..."
//
// No communication. Thread-safe.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "tessera/comm/watch/flight_record.h"

namespace tessera::comm {

enum class HangCause : uint8_t {
  kNone,          // no call is under way
  kDisagreement,  // ranks made different calls under one number of a group
  kAbsent,        // a rank has not made a call that others wait in, and waits for no rank itself
  kSilent,        // as kAbsent, for a rank without a record
  kLeft,          // as kAbsent, for a rank that has left the world
  kDeadlock,      // a cycle of ranks, each waiting in a call that the next rank has not made
  kAllInside,     // all ranks have made the call: a connection is stuck, or a rank is stopped
};

struct Diagnosis {
  HangCause cause = HangCause::kNone;
  int culprit = -1;  // global rank that is the cause; -1: no single rank
  std::string text;  // one line, no full stop
};

// `records`: flight records of one run, ordered by rank. A rank without a record has left the world if `left` contains
// it, and otherwise did not answer.
Diagnosis diagnose(const std::vector<FlightRecord>& records, const std::set<int>& left = {});

// Text such as "0, 1, 2". More than eight ranks are shortened: "0, 1, 2, 3, 4, 5, 6, 7 and 3 more".
std::string list_ranks(const std::set<int>& ranks);

// Text for the call that a rank is in, such as "rank 2 waits in all_reduce(sum) of float32 [4] for model.norm (call 7
// of group 'world'), begun 12.3 s before".
std::string describe_open_call(const FlightRecord& record);

}  // namespace tessera::comm
