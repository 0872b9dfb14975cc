// Whose fault it is that ranks wait: the flight records of some moment, compared.
//
//   const Diagnosis diagnosis = diagnose(records);
//   log_error("{}", diagnosis.text);        // "rank 1 has not made call 8 of group 'world', all_reduce(sum) of ..."
//
// No communication: the records are here already. Thread-safe.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "tessera/comm/watch/flight_record.h"

namespace tessera::comm {

enum class Fault : uint8_t {
  kNone,          // no call is under way
  kDisagreement,  // ranks made different calls where the same one was due
  kAbsent,        // a rank has not made a call that others wait in, and waits for nobody itself
  kSilent,        // the same of a rank without a record
  kLeft,          // and of one that has left the world
  kDeadlock,      // ranks wait for one another, each in a call that the next one has not made
  kAllInside,     // every rank is in the call: the connection, or a rank that is stopped
};

struct Diagnosis {
  Fault fault = Fault::kNone;
  int culprit = -1;  // global rank; -1: none alone
  std::string text;  // one line, no full stop
};

// `records` by rank, of one run. Ranks without one do not answer, or, when listed in `left`, have left the world.
Diagnosis diagnose(const std::vector<FlightRecord>& records, const std::set<int>& left = {});

// "0, 1, 2"; of more than eight the first, "and 3 more".
std::string list_ranks(const std::set<int>& ranks);

// "rank 2 waits since 12.3 s in all_reduce(sum) of float32 [4] for model.norm (call 7 of group 'world')"
std::string where_is(const FlightRecord& record);

}  // namespace tessera::comm
