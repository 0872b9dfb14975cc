#include "tessera/data/rows/cache_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>

namespace tessera::data {

// NFS implements flock() as a lock of a byte range, for which an exclusive lock needs a file that is open for writing.
UniqueFd open_to_lock(const std::filesystem::path& path, int flags) {
  UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0666));
  if (!file.open() && (errno == EACCES || errno == EPERM || errno == EROFS)) {
    file.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | (flags & ~O_CREAT)));
  }
  return file;
}

LockState try_lock(const UniqueFd& file) {
  while (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return LockState::kBusy;
    // All errors other than EWOULDBLOCK and EINTR mean kNoLocks. One of them is EBADF: on NFS, flock(LOCK_EX) fails
    // with it for a file that is open for reading only.
    if (errno != EINTR) return LockState::kNoLocks;
  }
  return LockState::kHeld;
}

bool locks_reach_all_hosts(const std::filesystem::path& folder) {
  struct statfs info {};
  return ::statfs(folder.c_str(), &info) == 0 && locks_reach_all_hosts_on(static_cast<int64_t>(info.f_type));
}

bool locks_reach_all_hosts_on(int64_t file_system) {
  constexpr int64_t kNfs = 0x6969, kLustre = 0x0BD00BD0, kSmb = 0x517B, kCifs = 0xFF534D42, kSmb2 = 0xFE534D42,
                    kFuse = 0x65735546, kGpfs = 0x47504653, kBeeGfs = 0x19830326, kPlan9 = 0x01021997,
                    kAfs = 0x5346414F;
  // statfs::f_type is signed and has 32 bits on some machines, so only its low 32 bits are compared.
  const auto found = file_system & 0xFFFFFFFF;
  constexpr int64_t kApart[] = {kNfs, kLustre, kSmb, kCifs, kSmb2, kFuse, kGpfs, kBeeGfs, kPlan9, kAfs};
  return std::find(std::begin(kApart), std::end(kApart), found) == std::end(kApart);
}

}  // namespace tessera::data
