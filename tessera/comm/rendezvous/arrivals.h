// What ranks say of themselves when they meet, and what rank 0 makes of it. No communication. Internal to comm.
//
//   const Agreement agreed = agree(arrivals);           // arrivals[r] is of rank r
//   info.local_rank = agreed.places[3].local_rank;  info.hosts = agreed.hosts;
//
// Thread-safe: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/rendezvous/world.h"

namespace tessera::comm {

struct Arrival {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 0;  // as whoever started it says; size 0: nobody does
  int64_t pid = 0;
  std::string host_name, host, cores;  // tessera/base/machine/host.h
  std::string address;                 // of its host on the way to rank 0's, as that is called there; "": only loopback

  std::string text() const;
  static Arrival parse(const std::string& text);  // Error kComm
  std::string who() const;                        // "rank 3 (process 77 on node4)"
};

// The place of a rank on its host.
struct Place {
  int local_rank = 0, local_size = 1;
  int cores_per_rank = 1;
  std::string other_host;  // for a rank whose way to rank 0's host is only loopback: the address of one on another host

  std::string text() const;
  static Place parse(const std::string& text);  // Error kComm
};

struct Agreement {
  Hosts hosts;
  std::vector<Place> places;
};

// Error kConfig names two ranks when one was told that all share its host and another one does not.
Agreement agree(const std::vector<Arrival>& arrivals);

std::string text_of_hosts(const Hosts& hosts);
Hosts hosts_of_text(const std::string& text);  // Error kComm

// The error of ranks that were told unlike sizes of the world.
std::string sizes_differ(const Arrival& one, const Arrival& other);

}  // namespace tessera::comm
