// The processes that the launcher starts: ranks, and the guard that outlives a killed launcher. Internal to comm.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tessera/base/files/unique_fd.h"

namespace tessera::comm {

// A process that does nothing but wait. When the launcher ends without having dismissed it, it kills the process
// groups it was told of and every process that has a path in `folder` in its environment, and removes `folder`.
class Guard {
 public:
  explicit Guard(const std::filesystem::path& folder);
  ~Guard();  // dismisses it
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  void watch(pid_t group);
  pid_t pid() const { return pid_; }
  // Somebody has killed it.
  bool has_ended();

 private:
  UniqueFd line_;
  pid_t pid_ = -1;
};

struct RankCommand {
  std::vector<std::string> arguments;
  std::map<std::string, std::string> set;  // environment
  std::vector<std::string> unset{};
  bool own_group = true;
  int out = -1, err = -1;    // what its stdout and stderr are; -1: this process's
  std::vector<int> cores{};  // to bind it to; empty: as this process
  int memory_node = -1;      // to take its memory from while there is some; -1: as this process
};

// Starts a rank, which dies with this process. Error kIo when there are too many processes.
pid_t start_rank(const RankCommand& command);

// Kills the children of this process that are not in `spared`: what ranks have left behind. The caller is a
// subreaper (prctl(2)), so orphans come to it.
void kill_orphans(const std::vector<pid_t>& spared);
std::vector<pid_t> children();
// Takes leave of those children that have ended and are not in `known`: what ranks left behind and the subreaper got.
void reap_orphans(const std::vector<pid_t>& known);

}  // namespace tessera::comm
