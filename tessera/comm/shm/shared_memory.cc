#include "tessera/comm/shm/shared_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text/random_hex.h"

namespace tessera::comm::shm {
namespace {

using std::chrono::milliseconds;

[[noreturn]] void fail(const char* operation) { raise(ErrorKind::kIo, "{}: {}", operation, std::strerror(errno)); }

// While an object of this class exists, SIGXFSZ is blocked on its thread: a call such as fallocate() that exceeds the
// file size limit (RLIMIT_FSIZE) then fails with an error, and the signal does not end the process. The destructor
// discards a SIGXFSZ that is pending.
class WithoutFileSizeSignal {
 public:
  WithoutFileSizeSignal() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    ::pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~WithoutFileSizeSignal() {
    const timespec now{};
    while (::sigtimedwait(&signal_, nullptr, &now) > 0) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t signal_{}, before_{};
};

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

// With vm.memfd_noexec = 2 the kernel refuses files that could be executed, so MFD_NOEXEC_SEAL is set. Kernels
// before 6.3 do not know this flag.
UniqueFd anonymous_file() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int number = ::memfd_create("tessera", kFlags | MFD_NOEXEC_SEAL);
  if (number < 0 && errno == EINVAL) number = ::memfd_create("tessera", kFlags);
  if (number < 0) fail("memfd_create");
  return UniqueFd(number);
}

// fallocate() allocates all pages now, so that a lack of memory is an error here and not SIGBUS at a later access. The
// seals keep every process from changing the size.
UniqueFd make_file(size_t bytes) {
  UniqueFd file = anonymous_file();
  if (::fchmod(file.get(), S_IRUSR | S_IWUSR) != 0) fail("fchmod of a memfd");
  int refused;
  {
    const WithoutFileSizeSignal guard;
    do {
      refused = ::fallocate(file.get(), 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    } while (refused == EINTR);
  }
  TESSERA_CHECK(refused == 0, ErrorKind::kIo, "{} bytes of shared memory: {}", bytes, std::strerror(refused));
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("sealing a memfd");
  return file;
}

sockaddr_un abstract_address(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  TESSERA_CHECK(!name.empty() && name.size() < sizeof address.sun_path, ErrorKind::kIo, "'{}' is no socket name", name);
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero byte: abstract namespace
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

// Returns whether `socket` is readable, after waiting for at most 100 ms. Error kIo when `deadline` has passed.
bool ready(int socket, Clock::time_point deadline, const char* operation) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
  TESSERA_CHECK(left.count() > 0, ErrorKind::kIo, "{}: timed out", operation);
  pollfd state{.fd = socket, .events = POLLIN, .revents = 0};
  const int count = ::poll(&state, 1, static_cast<int>(std::min(left, milliseconds(100)).count()));
  if (count < 0 && errno != EINTR) fail(operation);
  return count > 0;
}

// A message of one byte that carries the file descriptor `descriptor` (SCM_RIGHTS). With descriptor -1 the object
// carries none: recvmsg() writes a received message with its file descriptor into the object.
struct DescriptorMessage {
  explicit DescriptorMessage(int descriptor) {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    if (descriptor < 0) return;
    cmsghdr* first = CMSG_FIRSTHDR(&header);
    first->cmsg_level = SOL_SOCKET;
    first->cmsg_type = SCM_RIGHTS;
    first->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(first), &descriptor, sizeof descriptor);
  }
  char byte = 'm';
  iovec part{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
};

}  // namespace

SharedMemory::SharedMemory(UniqueFd file, size_t bytes) : file_(std::move(file)), bytes_(bytes) {
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_.get(), 0);
  if (mapped == MAP_FAILED) fail("mapping shared memory");
  data_ = static_cast<std::byte*>(mapped);
}

SharedMemory::~SharedMemory() { ::munmap(data_, bytes_); }

std::unique_ptr<SharedMemory> SharedMemory::create(size_t bytes) {
  return std::unique_ptr<SharedMemory>(new SharedMemory(make_file(bytes), bytes));
}

// The peer is checked twice: its socket must belong to the same user, and the received file must have the expected size
// and the seal against shrinking, without which an access could raise SIGBUS.
std::unique_ptr<SharedMemory> SharedMemory::receive(const std::string& address, size_t bytes,
                                                    Clock::time_point deadline) {
  const UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (socket.get() < 0) fail("socket");
  socklen_t length = 0;
  const sockaddr_un name = abstract_address(address, length);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0) {
    fail("connecting to the rank that made the shared memory");
  }
  TESSERA_CHECK(same_user(socket.get()), ErrorKind::kIo,
                "the socket of the rank that made the shared memory belongs to another user");
  while (!ready(socket.get(), deadline, "waiting for shared memory")) {
  }
  DescriptorMessage message(-1);
  const ssize_t count = ::recvmsg(socket.get(), &message.header, MSG_CMSG_CLOEXEC);
  if (count < 0) fail("receiving shared memory");
  const cmsghdr* first = CMSG_FIRSTHDR(&message.header);
  TESSERA_CHECK(count == 1 && first && first->cmsg_type == SCM_RIGHTS, ErrorKind::kIo,
                "the rank that made the shared memory closed the connection");
  int number = -1;
  std::memcpy(&number, CMSG_DATA(first), sizeof number);
  UniqueFd file(number);
  struct stat status {};
  const int seals = ::fcntl(number, F_GET_SEALS);
  TESSERA_CHECK(::fstat(number, &status) == 0 && status.st_size == static_cast<off_t>(bytes) && seals > 0 &&
                    (seals & F_SEAL_SHRINK),
                ErrorKind::kIo, "the shared memory is not the one that was announced");
  return std::unique_ptr<SharedMemory>(new SharedMemory(std::move(file), bytes));
}

MemoryServer::MemoryServer() : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  if (socket_.get() < 0) fail("socket");
  address_ = "tessera-" + random_hex(16);
  socklen_t length = 0;
  const sockaddr_un name = abstract_address(address_, length);
  if (::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0) fail("binding a Unix socket");
  if (::listen(socket_.get(), SOMAXCONN) != 0) fail("listening on a Unix socket");
}

// Failed connections and connections of other users do not count: the loop ends when the descriptor was sent to
// `processes` processes.
void MemoryServer::hand_out(const SharedMemory& memory, int processes, Clock::time_point deadline,
                            const std::function<void()>& check) {
  while (processes > 0) {
    if (!ready(socket_.get(), deadline, "waiting for the ranks to fetch the shared memory")) {
      check();
      continue;
    }
    const UniqueFd peer(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (peer.get() < 0 && (errno == EMFILE || errno == ENFILE)) fail("accepting a rank");
    if (peer.get() < 0 || !same_user(peer.get())) continue;
    DescriptorMessage message(memory.descriptor());
    if (::sendmsg(peer.get(), &message.header, MSG_NOSIGNAL) == 1) --processes;
  }
}

}  // namespace tessera::comm::shm
