#include "tessera/comm/backends/gloo_backend.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/base/error.h"
#include "tessera/base/text/random_hex.h"
#include "tessera/base/text/siphash.h"
#include "tessera/comm/backends/interface_choice.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;

// Calls visit(descriptor, target) for every open descriptor of this process. The target is the descriptor's link in
// /proc, such as "socket:[INODE]" or "anon_inode:[eventpoll]".
template <class Visit>
void for_each_descriptor(const Visit& visit) {
  std::error_code failed;
  for (fs::directory_iterator entry("/proc/self/fd", failed), end; !failed && entry != end; entry.increment(failed)) {
    std::error_code gone;
    const std::string target = fs::read_symlink(entry->path(), gone).string();
    if (!gone) visit(std::atoi(entry->path().filename().c_str()), target);
  }
}

template <class Visit>
void for_each_socket(const Visit& visit) {
  for_each_descriptor([&](int descriptor, const std::string& target) {
    if (target.starts_with("socket:")) visit(descriptor, target);
  });
}

// The descriptors that epoll instances of this process wait for.
std::set<int> epoll_targets() {
  std::set<int> descriptors;
  for_each_descriptor([&](int descriptor, const std::string& target) {
    if (target != "anon_inode:[eventpoll]") return;
    std::ifstream lines(fmt::format("/proc/self/fdinfo/{}", descriptor));
    for (std::string word; lines >> word;) {
      int watched = -1;
      if (word == "tfd:" && lines >> watched) descriptors.insert(watched);
    }
  });
  return descriptors;
}

bool listens(int descriptor) {
  int listens = 0;
  socklen_t length = sizeof listens;
  return ::getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens != 0;
}

// Returns the local or the remote address of a socket, such as "127.0.0.1 4711"; "" when the socket has none.
// `name_of`: ::getsockname or ::getpeername.
template <class NameOf>
std::string end_of(int descriptor, const NameOf& name_of) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (name_of(descriptor, generic, &size) != 0 || (generic->sa_family != AF_INET && generic->sa_family != AF_INET6) ||
      ::getnameinfo(generic, size, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "";
  }
  return std::string(host) + " " + port;
}

// Returns the addresses of the listening sockets that may be Gloo's, by "socket:[INODE]". Gloo waits for its sockets
// with epoll, so sockets in no epoll instance, which other threads may open at the same time, are left out.
std::map<std::string, std::string> polled_listeners() {
  const auto watched = epoll_targets();
  std::map<std::string, std::string> ends;
  for_each_socket([&](int descriptor, const std::string& socket) {
    const bool may_be_gloos =
        watched.empty() || watched.contains(descriptor);  // some kernels do not list epoll's targets
    if (may_be_gloos && listens(descriptor)) ends[socket] = end_of(descriptor, ::getsockname);
  });
  return ends;
}

// Makes a Gloo device and finds the address at which the device listens. Gloo does not reveal this address; it is that
// of the listening socket that did not exist before. A lock keeps the other ranks of this process from making devices
// at the same time.
template <class Make>
auto make_device(const Make& make, std::string& listens_at) {
  static std::mutex one_by_one;  // shared by all ranks of this process
  const std::lock_guard lock(one_by_one);
  const auto before = polled_listeners();
  auto device = make();
  for (const auto& [socket, end] : polled_listeners()) {
    if (!before.contains(socket) && !end.empty()) listens_at = end;
  }
  TESSERA_CHECK(!listens_at.empty(), ErrorKind::kComm,
                "[comm.gloo] no socket of this process listens for the ranks of a group: /proc must be mounted");
  return device;
}

constexpr size_t kWord = sizeof(uint64_t);

// The word by which rank `from` authenticates itself to rank `to`. Only a process that knows the group's secret can
// compute it.
uint64_t authentication_word(const SipKey& secret, int from, int to) {
  return siphash(secret, fmt::format("{} says to {}", from, to));
}

// The group's secret, which its first rank puts into the store.
SipKey shared_secret(c10d::Store& store, int rank) {
  const std::string key = "secret";
  if (rank == 0) store.set(key, random_hex(sizeof(SipKey)));
  const auto digits = store.get_to_str(key);
  TESSERA_CHECK(digits.size() == 4 * kWord, ErrorKind::kComm,
                "[comm.gloo] the first rank of the group has stored a secret of {} digits, wanted {}: that rank runs "
                "another version of Tessera",
                digits.size(), 4 * kWord);
  return {std::stoull(digits.substr(0, 2 * kWord), nullptr, 16), std::stoull(digits.substr(2 * kWord), nullptr, 16)};
}

// Gloo has no abort: if a rank closes a connection through Gloo, its own waits on the connection last until their
// timeout. An end of file on the socket ends the waits on both sides. So abort() calls shutdown(2) on the group's
// connections: those accepted at this rank's listener and those made to the peers' listeners. If the ranks are threads
// of one process, this also shuts down connections of other ranks to these listeners; the group is aborted on those
// ranks too. Sockets are remembered by inode, not by descriptor, since a closed descriptor number may be reused.
class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  GlooBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options,
              const std::string& listens_at, bool loopback)
      : ProcessGroupGloo(store, rank, size, std::move(options)) {
    const auto key = [](int of) { return "listens_at/" + std::to_string(of); };
    store->set(key(rank), listens_at);
    std::set<std::string> of_peers;
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) of_peers.insert(store->get_to_str(key(peer)));
    }
    for_each_socket([&](int descriptor, const std::string& socket) {
      if (listens(descriptor)) return;
      const std::string own = end_of(descriptor, ::getsockname), other = end_of(descriptor, ::getpeername);
      if (!other.empty() && (own == listens_at || of_peers.contains(other))) connections_.insert(socket);
    });
    if (!loopback) authenticate_peers(shared_secret(*store, rank));
  }

  void abort() override {
    for_each_socket([&](int descriptor, const std::string& socket) {
      if (connections_.contains(socket)) ::shutdown(descriptor, SHUT_RDWR);
    });
  }

 private:
  // Authenticates all connections of the group. Gloo accepts any process that connects in place of the rank that it
  // expects. So every rank sends each peer a 64-bit word, authentication_word() of the group's secret and the two
  // ranks, in one all-to-all. It then compares each received word with the expected one.
  void authenticate_peers(const SipKey& secret) {
    const auto size = static_cast<int64_t>(getSize());
    auto sent = at::empty({size}, at::kLong), received = at::empty({size}, at::kLong);
    for (int peer = 0; peer < getSize(); ++peer) {
      sent.mutable_data_ptr<int64_t>()[peer] = static_cast<int64_t>(authentication_word(secret, getRank(), peer));
    }
    std::vector<int64_t> even{};
    try {
      alltoall_base(received, sent, even, even)->wait();
    } catch (const std::exception& error) {
      throw Error(ErrorKind::kComm,
                  fmt::format("[comm.gloo] the ranks of a new group could not authenticate one another: {}. A rank has "
                              "ended, or another process has connected in its place",
                              error.what()));
    }
    for (int peer = 0; peer < getSize(); ++peer) {
      const auto word = static_cast<uint64_t>(received.const_data_ptr<int64_t>()[peer]);
      TESSERA_CHECK(word == authentication_word(secret, peer, getRank()), ErrorKind::kComm,
                    "[comm.gloo] the process that has connected as rank {} of a new group does not know the group's "
                    "secret, so it is not a rank of this run. Find out which process reaches this host's ports, and "
                    "start the run again",
                    peer);
    }
  }

  std::set<std::string> connections_;  // "socket:[INODE]" of the group's connections
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(c10::intrusive_ptr<c10d::Store> store, const GlooOptions& options) {
  using c10d::ProcessGroupGloo;
  auto gloo = ProcessGroupGloo::Options::create(options.timeout);
  // An address is always chosen here: Gloo's default, looking up the host's own name, gives loopback where DNS does not
  // know that name.
  const std::string own = options.loopback ? "127.0.0.1" : own_address(options.other_host);
  const auto make = [&] {
    return own.empty() ? ProcessGroupGloo::createDefaultDevice() : ProcessGroupGloo::createDeviceForHostname(own);
  };
  std::string listens_at;
  gloo->devices.push_back(make_device(make, listens_at));
  return c10::make_intrusive<GlooBackend>(store, options.rank, options.size, std::move(gloo), listens_at,
                                          options.loopback);
}

}  // namespace tessera::comm
