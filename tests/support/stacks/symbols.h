// The functions at addresses of another process.
//
//   const ProcessMap map(pid);
//   map.describe(0x7f3a5c2d1e10);    // "c10d::Work::wait(std::chrono::duration<...>)+0x5c (libtorch_cpu.so)"
//
// A module is read when one of its addresses is described: the ELF file on disk, with its full symbol table or, if that
// was stripped, the table of exported symbols. Not thread-safe.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace tessera::testing {

class Module;

class ProcessMap {
 public:
  explicit ProcessMap(pid_t process);
  ~ProcessMap();
  std::string describe(uint64_t address) const;

 private:
  struct Range {
    uint64_t begin = 0, end = 0, offset = 0;  // range of addresses, and its offset in the file
    std::string path;
  };
  std::vector<Range> ranges_;
  mutable std::map<std::string, std::shared_ptr<const Module>> modules_;
};

}  // namespace tessera::testing
