#include "tessera/train/nemo/storage_file.h"

#include <c10/core/CPUAllocator.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/files/unique_fd.h"

namespace tessera::train {
namespace {

constexpr size_t kStorageAlignment = 64;  // the alignment of libtorch's CPU allocator, in bytes

// A mapping of the whole file. The deleter context of every storage in the file is a std::shared_ptr to this object, so
// the file is unmapped when the memory of the last storage is freed.
struct MappedRegion {
  void* data = nullptr;
  size_t bytes = 0;
  MappedRegion(void* data, size_t bytes) : data(data), bytes(bytes) {}
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;
  ~MappedRegion() { ::munmap(data, bytes); }
};

void release_map(void* context) { delete static_cast<std::shared_ptr<MappedRegion>*>(context); }

// Creates a file and unlinks it at once: its space is freed when it is closed and unmapped, also if the process dies.
UniqueFd file_without_name(const std::filesystem::path& folder) {
  int fd = -1;
  const auto path = create_temporary(folder, "parked", [&fd](const std::filesystem::path& name) {
    fd = ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    return fd >= 0 ? 0 : errno;
  });
  ::unlink(path.c_str());
  return UniqueFd(fd);
}

void write_all(int fd, size_t offset, const std::byte* data, size_t bytes, const std::filesystem::path& folder) {
  while (bytes > 0) {
    const ssize_t step = ::pwrite(fd, data, bytes, static_cast<off_t>(offset));
    if (step < 0 && errno == EINTR) continue;
    TESSERA_CHECK(step > 0, ErrorKind::kIo, "[train.offload] {}: {} bytes cannot be written: {}. Free some space.",
                  folder.string(), bytes, std::strerror(errno));
    data += step;
    offset += static_cast<size_t>(step);
    bytes -= static_cast<size_t>(step);
  }
}

}  // namespace

void storages_to_file(const std::vector<c10::Storage>& storages, const std::filesystem::path& folder) {
  std::vector<size_t> offsets;
  size_t end = 0;
  for (const auto& storage : storages) {
    offsets.push_back(end);
    end = (end + storage.nbytes() + kStorageAlignment - 1) / kStorageAlignment * kStorageAlignment;
  }
  if (end == 0) return;
  // The bytes of all storages are written to the file before the first storage is moved to the file's mapping, so an
  // error leaves all storages in memory. The bytes are written with pwrite(2) and not through the mapping, because a
  // full disk is then an error and not SIGBUS.
  const UniqueFd fd = file_without_name(folder);
  for (size_t i = 0; i < storages.size(); ++i) {
    write_all(fd.get(), offsets[i], static_cast<const std::byte*>(storages[i].data()), storages[i].nbytes(), folder);
  }
  TESSERA_CHECK(::ftruncate(fd.get(), static_cast<off_t>(end)) == 0, ErrorKind::kIo,
                "[train.offload] {}: a file of {} bytes cannot be made: {}", folder.string(), end,
                std::strerror(errno));
  void* const data = ::mmap(nullptr, end, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  TESSERA_CHECK(data != MAP_FAILED, ErrorKind::kIo, "[train.offload] {}: {} bytes cannot be mapped: {}",
                folder.string(), end, std::strerror(errno));
  const auto map = std::make_shared<MappedRegion>(data, end);
  for (size_t i = 0; i < storages.size(); ++i) {
    if (storages[i].nbytes() == 0) continue;
    storages[i].unsafeGetStorageImpl()->set_data_ptr_noswap(
        {static_cast<std::byte*>(data) + offsets[i], new std::shared_ptr<MappedRegion>(map), &release_map, c10::kCPU});
  }
}

void storages_to_memory(const std::vector<c10::Storage>& storages) {
  for (const auto& storage : storages) {
    auto* const impl = storage.unsafeGetStorageImpl();
    if (storage.data_ptr().get_deleter() != &release_map) continue;
    auto* const allocator = impl->allocator() != nullptr ? impl->allocator() : c10::GetCPUAllocator();
    c10::DataPtr memory = allocator->allocate(storage.nbytes());
    std::memcpy(memory.get(), storage.data(), storage.nbytes());
    impl->set_data_ptr_noswap(std::move(memory));
  }
}

}  // namespace tessera::train
