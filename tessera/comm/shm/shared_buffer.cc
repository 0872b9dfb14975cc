#include "tessera/comm/shm/shared_buffer.h"

#include <c10/core/CPUAllocator.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <shared_mutex>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/shm/shared_memory.h"

namespace tessera::comm::shm {
namespace {

constexpr size_t kLeast = 64 * 1024;  // bytes; smaller allocations are ordinary memory
constexpr size_t kPage = 4096;

// The id of a buffer, in a page of its own before the data. It is zero once the buffer has been freed, because the
// owner's fallocate() then removes all pages. Peers thereby recognise freed buffers and reused descriptors.
using BufferId = std::atomic<uint64_t>;
static_assert(BufferId::is_always_lock_free);

uint64_t fresh_id() {
  uint64_t id = 0;
  while (id == 0) {
    TESSERA_CHECK(::getrandom(&id, sizeof id, 0) == sizeof id, ErrorKind::kIo, "getrandom: {}", std::strerror(errno));
  }
  return id;
}

std::atomic<size_t> viewed{0};

class Buffer {
 public:
  explicit Buffer(size_t bytes) : memory_(SharedMemory::create(kPage + bytes)) {
    new (memory_->data()) BufferId(fresh_id());
  }
  // Returns the pages to the system although peers may still map them: a late reader reads zeros and gets no SIGBUS. A
  // forked child must not return the pages, since its parent still uses them.
  ~Buffer() {
    if (::getpid() != owner_) return;
    ::fallocate(memory_->descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                static_cast<off_t>(memory_->bytes()));
  }
  std::byte* data() const { return memory_->data() + kPage; }
  bool holds(const std::byte* begin, size_t bytes) const {
    const auto offset = static_cast<size_t>(begin - memory_->data());
    return offset <= memory_->bytes() && bytes <= memory_->bytes() - offset;
  }
  SharedBufferPlace place_of(const std::byte* begin) const {
    return {.buffer = reinterpret_cast<const BufferId*>(memory_->data())->load(),
            .offset = static_cast<uint64_t>(begin - memory_->data()),
            .descriptor = memory_->descriptor()};
  }

 private:
  std::unique_ptr<SharedMemory> memory_;
  pid_t owner_ = ::getpid();
};

// The allocator. `buffers_` is ordered by address, so find() gets the buffer of any pointer inside it by a search.
class SharedBuffers final : public c10::Allocator {
 public:
  static SharedBuffers& instance() {
    static auto* buffers = new SharedBuffers;  // outlives tensors in static memory
    return *buffers;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kLeast) return ordinary().allocate(bytes);
    std::unique_ptr<Buffer> buffer;
    try {
      check_descriptors();
      buffer = std::make_unique<Buffer>(bytes);
    } catch (const Error& error) {
      if (!refused_.exchange(true)) {
        log_warning("[comm.shm] buffers are not shared with the ranks of this host, collectives copy twice: {}",
                    error.what());
      }
      return ordinary().allocate(bytes);
    }
    std::byte* data = buffer->data();
    const std::unique_lock lock(mutex_);
    buffers_.emplace(data, std::move(buffer));
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // the deleter depends on the kind of memory
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  std::optional<SharedBufferPlace> find(const std::byte* data, size_t bytes) {
    const std::shared_lock lock(mutex_);
    auto found = buffers_.upper_bound(data);
    if (found == buffers_.begin()) return std::nullopt;
    const Buffer& buffer = *(--found)->second;
    if (!buffer.holds(data, bytes)) return std::nullopt;
    return buffer.place_of(data);
  }

 private:
  // Every buffer needs a file descriptor. Buffers may use half of the process's limit; the rest is for other uses.
  void check_descriptors() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    const std::shared_lock lock(mutex_);
    TESSERA_CHECK(buffers_.size() < limit.rlim_cur / 2, ErrorKind::kIo,
                  "{} buffers hold half of the {} files that this process may open (ulimit -n)", buffers_.size(),
                  limit.rlim_cur);
  }
  static c10::Allocator& ordinary() { return *c10::GetDefaultCPUAllocator(); }
  static void release(void* data) { instance().erase(static_cast<const std::byte*>(data)); }
  void erase(const std::byte* data) {
    std::unique_ptr<Buffer> buffer;  // declared before the lock, so that the buffer is freed after unlocking
    const std::unique_lock lock(mutex_);
    buffer = std::move(buffers_.extract(data).mapped());
  }

  std::shared_mutex mutex_;
  std::map<const std::byte*, std::unique_ptr<Buffer>> buffers_;
  std::atomic<bool> refused_{false};
};

[[noreturn]] void refuse(pid_t process, const char* operation) {
  raise(ErrorKind::kIo, "a buffer of process {}: {}: {}", process, operation, std::strerror(errno));
}

}  // namespace

c10::Allocator& shared_buffers() { return SharedBuffers::instance(); }

std::optional<SharedBufferPlace> find_shared(const void* data, size_t bytes) {
  return SharedBuffers::instance().find(static_cast<const std::byte*>(data), bytes);
}

size_t viewed_bytes() { return viewed; }

// Tries to read the link /proc/PID/exe, for which the kernel requires the same permission as to open /proc/PID/fd/N.
bool can_open_buffers(pid_t process) {
  char program[8];
  return ::readlink(fmt::format("/proc/{}/exe", process).c_str(), program, sizeof program) >= 0;
}

// /proc/PID/fd/N opens the file itself. The owner may have closed the descriptor and opened another file under the same
// number, so the type of the file and the id in its first page are checked before it is mapped.
SharedView::SharedView(pid_t process, const SharedBufferPlace& place) {
  const UniqueFd file(
      ::open(fmt::format("/proc/{}/fd/{}", process, place.descriptor).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) refuse(process, "open");
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) refuse(process, "fstat");
  TESSERA_CHECK(S_ISREG(status.st_mode) && static_cast<uint64_t>(status.st_size) > place.offset, ErrorKind::kIo,
                "a buffer of process {} is no longer there", process);
  uint64_t id = 0;
  TESSERA_CHECK(::pread(file.get(), &id, sizeof id, 0) == sizeof id && id == place.buffer, ErrorKind::kIo,
                "a buffer of process {} is another file by now", process);
  bytes_ = static_cast<size_t>(status.st_size);
  void* mapped = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED | MAP_POPULATE, file.get(), 0);
  if (mapped == MAP_FAILED) refuse(process, "mmap");
  base_ = static_cast<const std::byte*>(mapped);
  viewed += bytes_;
}

SharedView::~SharedView() {
  if (base_ == nullptr) return;
  ::munmap(const_cast<std::byte*>(base_), bytes_);
  viewed -= bytes_;
}
SharedView::SharedView(SharedView&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
SharedView& SharedView::operator=(SharedView&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

bool SharedView::is_freed() const noexcept { return reinterpret_cast<const BufferId*>(base_)->load() == 0; }

}  // namespace tessera::comm::shm
