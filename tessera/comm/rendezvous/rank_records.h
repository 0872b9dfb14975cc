// The records that ranks exchange at the rendezvous: each rank describes itself (RankRecord), and rank 0 computes from
// all records which ranks share a host (RendezvousResult). No communication. Internal to comm.
//
//   const RendezvousResult agreed = agree(records);           // records[r] describes rank r
//   info.local_rank = agreed.positions[3].local_rank;  info.hosts = agreed.hosts;
//
// Thread-safe: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/rendezvous/world.h"

namespace tessera::comm {

// One rank's description of itself.
struct RankRecord {
  int rank = 0, size = 1;              // size: world size
  int local_rank = 0, local_size = 0;  // from the environment; local_size 0: not known
  int64_t pid = 0;
  std::string host_name, host, cores;  // name, identity and affinity mask (tessera/base/machine/host.h)
  std::string address;  // address of its host's interface towards rank 0's host; "": that interface is loopback

  std::string text() const;
  static RankRecord parse(const std::string& text);  // Error kComm
  std::string who() const;                           // "rank 3 (process 77 on node4)"
};

// Rank 0's answer to one rank: the position of this rank on its host.
struct RankPosition {
  int local_rank = 0, local_size = 1;
  int cores_per_rank = 1;
  std::string other_host;  // address of a rank on another host, for a rank that reaches rank 0 over loopback only

  std::string text() const;
  static RankPosition parse(const std::string& text);  // Error kComm
};

struct RendezvousResult {
  HostSummary hosts;
  std::vector<RankPosition> positions;
};

// Computes hosts and positions from the records of all ranks. Error kConfig names two ranks when one was started as if
// all ranks shared its host and the other one is on another host or was started differently.
RendezvousResult agree(const std::vector<RankRecord>& records);

std::string text_of_hosts(const HostSummary& hosts);
HostSummary hosts_of_text(const std::string& text);  // Error kComm

// The error message for two ranks that were started with different world sizes.
std::string sizes_differ(const RankRecord& one, const RankRecord& other);

}  // namespace tessera::comm
