#include "tessera/base/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/files/unique_fd.h"

namespace tessera {
namespace {

// Table of the maps of this process for the SIGBUS handler, which must not lock or allocate. A slot is reserved by
// setting `begin`. The handler reads a slot only while `size_bytes` is not 0; it is set last and cleared first, so a
// slot that is read is complete. `path` belongs to the MappedFile, which outlives all reads of its bytes.
struct MapSlot {
  std::atomic<const std::byte*> begin{nullptr};
  std::atomic<const char*> path{nullptr};
  std::atomic<size_t> size_bytes{0};
};
constexpr size_t kMaxMaps = 4096;
std::array<MapSlot, kMaxMaps> map_slots;

void register_map(const std::byte* begin, size_t size_bytes, const char* path) {
  for (auto& slot : map_slots) {
    const std::byte* free = nullptr;
    if (!slot.begin.compare_exchange_strong(free, begin)) continue;
    slot.path = path;
    slot.size_bytes = size_bytes;
    return;
  }
}

void unregister_map(const std::byte* begin) {
  for (auto& slot : map_slots) {
    if (slot.begin != begin) continue;
    slot.size_bytes = 0;
    slot.path = nullptr;
    slot.begin = nullptr;
    return;
  }
}

// The path of the map that contains the address; null if no map does.
const char* path_at(const std::byte* address) {
  for (const auto& slot : map_slots) {
    const std::byte* begin = slot.begin;
    const size_t size_bytes = slot.size_bytes;
    if (size_bytes > 0 && address >= begin && address < begin + size_bytes) return slot.path;
  }
  return nullptr;
}

int cut_file_exit_code = 1;

void write_text(const char* text) {
  [[maybe_unused]] const auto ignored = ::write(STDERR_FILENO, text, std::strlen(text));
}

// The handler of SIGBUS. Ends the process with a message if the faulting address is in a file that MappedFile has
// mapped. Otherwise restores the default action and returns: the faulting read runs again, and the default action ends
// the process. The handler calls only functions that are safe in signal handlers.
void on_bus_error(int signal, siginfo_t* info, void* /*context*/) {
  const char* path = path_at(static_cast<const std::byte*>(info->si_addr));
  if (path == nullptr) {
    struct sigaction plain {};
    plain.sa_handler = SIG_DFL;
    ::sigaction(signal, &plain, nullptr);
    return;
  }
  write_text("[tessera] error: [file] ");
  write_text(path);
  write_text(
      ": became shorter while it was read, or its disk failed. Write or fetch the file again, and start when that is "
      "done.\n");
  ::_exit(cut_file_exit_code);
}

}  // namespace

void report_cut_files() {
  cut_file_exit_code = Error(ErrorKind::kIo, "").exit_code();
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path) {
  const UniqueFd opened(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  TESSERA_CHECK(opened.open(), ErrorKind::kIo, "[file] {}: cannot be opened for reading: {}", path.string(),
                std::strerror(errno));
  struct stat info {};
  TESSERA_CHECK(::fstat(opened.get(), &info) == 0 && S_ISREG(info.st_mode), ErrorKind::kIo,
                "[file] {}: is not a regular file", path.string());
  const auto size_bytes = static_cast<size_t>(info.st_size);
  void* data = nullptr;
  if (size_bytes > 0) {
    data = ::mmap(nullptr, size_bytes, PROT_READ, MAP_PRIVATE, opened.get(), 0);
    TESSERA_CHECK(data != MAP_FAILED, ErrorKind::kIo, "[file] {}: {} bytes cannot be mapped: {}", path.string(),
                  size_bytes, std::strerror(errno));
  }
  std::shared_ptr<const MappedFile> file(new MappedFile(path, static_cast<const std::byte*>(data), size_bytes));
  if (data != nullptr) register_map(file->data_, size_bytes, file->path_.c_str());
  return file;
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  unregister_map(data_);
  ::munmap(const_cast<std::byte*>(data_), size_bytes_);
}

}  // namespace tessera
