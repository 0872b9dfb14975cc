// The processes that the launcher starts: ranks, and the guard that outlives a killed launcher. Internal to comm.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tessera/base/files/unique_fd.h"

namespace tessera::comm {

// A helper process that only waits. When the launcher ends without dismissing the guard (it was killed), the guard
// kills the process groups passed to watch() and every process whose environment contains a path in `folder`, and
// removes `folder`.
class OrphanGuard {
 public:
  explicit OrphanGuard(const std::filesystem::path& folder);
  ~OrphanGuard();  // dismisses the guard process and waits for its end
  OrphanGuard(const OrphanGuard&) = delete;
  OrphanGuard& operator=(const OrphanGuard&) = delete;
  void watch(pid_t group);
  pid_t pid() const { return pid_; }
  // Whether the guard process has ended. It ends early only when it is killed.
  bool has_ended();

 private:
  UniqueFd line_;  // socket to the guard process
  pid_t pid_ = -1;
};

struct RankCommand {
  std::vector<std::string> arguments;
  std::map<std::string, std::string> set;  // environment variables to set, in addition to those of this process
  std::vector<std::string> unset{};        // environment variables to remove
  bool own_group = true;                   // give the rank its own process group
  int out = -1, err = -1;                  // descriptors of its stdout and stderr; -1: inherit
  std::vector<int> cores{};                // cores to bind the rank to; empty: inherit
  int memory_node = -1;                    // preferred NUMA node of its memory; -1: inherit
};

// Starts a rank process, which the kernel kills when this process dies. Error kIo when no process can be started.
pid_t start_rank(const RankCommand& command);

// Kills the children of this process that are not in `excluded`: processes that ranks left behind. The caller must be a
// subreaper (prctl(2)), so that such orphans are its children.
void kill_orphans(const std::vector<pid_t>& excluded);
std::vector<pid_t> children();
// Reaps (waitpid) the children that have ended and are not in `known`: processes that ranks left behind.
void reap_orphans(const std::vector<pid_t>& known);

}  // namespace tessera::comm
