#include "tessera/comm/backends/gloo_backend.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/base/listen.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;

// Calls visit(descriptor, "socket:[inode]") for every open socket of this process.
template <class Visit>
void for_each_socket(const Visit& visit) {
  std::error_code failed;
  for (fs::directory_iterator entry("/proc/self/fd", failed), end; !failed && entry != end; entry.increment(failed)) {
    std::error_code gone;
    const std::string target = fs::read_symlink(entry->path(), gone).string();
    if (!gone && target.starts_with("socket:")) visit(std::atoi(entry->path().filename().c_str()), target);
  }
}

bool listens(int descriptor) {
  int listens = 0;
  socklen_t length = sizeof listens;
  return ::getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens != 0;
}

// "127.0.0.1 4711" of the own or the other end (::getsockname, ::getpeername); "" when it has none.
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

std::map<std::string, std::string> listeners() {
  std::map<std::string, std::string> ends;
  for_each_socket([&](int descriptor, const std::string& socket) {
    if (listens(descriptor)) ends[socket] = end_of(descriptor, ::getsockname);
  });
  return ends;
}

// A device, and where it listens.
template <class Make>
auto make_device(const Make& make, std::string& listens_at) {
  static std::mutex one_by_one;  // of the ranks of this process
  const std::lock_guard lock(one_by_one);
  const auto before = listeners();
  auto device = make();
  for (const auto& [socket, end] : listeners()) {
    if (!before.contains(socket)) listens_at = end;
  }
  return device;
}

// Gloo has no abort: closing a connection of its own leaves the local waits standing until their timeout. An end of
// file does end them, here and at the peer, so abort() shuts the group's connections down underneath it: those that it
// has accepted at its own listener, and those that it has made to its peers' listeners, which are the group's alone.
// With ranks as threads that includes the other rank's half, which is aborted with this one.
class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  GlooBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options,
              const std::string& listens_at)
      : ProcessGroupGloo(store, rank, size, std::move(options)), listens_at_(listens_at) {
    const auto key = [](int of) { return "listens_at/" + std::to_string(of); };
    store->set(key(rank), std::vector<uint8_t>(listens_at.begin(), listens_at.end()));
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const auto end = store->get(key(peer));
      peers_listen_at_.emplace(end.begin(), end.end());
    }
  }

  void abort() override {
    for_each_socket([&](int descriptor, const std::string&) {
      if (listens(descriptor)) return;
      const std::string own = end_of(descriptor, ::getsockname), other = end_of(descriptor, ::getpeername);
      if (!other.empty() && (own == listens_at_ || peers_listen_at_.contains(other))) ::shutdown(descriptor, SHUT_RDWR);
    });
  }

 private:
  const std::string listens_at_;
  std::set<std::string> peers_listen_at_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(c10::intrusive_ptr<c10d::Store> store, const GlooOptions& options) {
  using c10d::ProcessGroupGloo;
  auto gloo = ProcessGroupGloo::Options::create(options.timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  // What Gloo does by itself, to look up the own host name, gives loopback where that name is not known.
  const std::string own = options.loopback ? "127.0.0.1" : address_towards(options.other_host);
  constexpr bool kLazy = true;  // two ranks connect when one first sends to the other, not all to all at the start
  const auto make = [&] {
    if (!options.loopback && interface && *interface) {
      return ProcessGroupGloo::createDeviceForInterface(interface, kLazy);
    }
    return own.empty() ? ProcessGroupGloo::createDefaultDevice(kLazy)
                       : ProcessGroupGloo::createDeviceForHostname(own, kLazy);
  };
  std::string listens_at;
  gloo->devices.push_back(make_device(make, listens_at));
  return c10::make_intrusive<GlooBackend>(store, options.rank, options.size, std::move(gloo), listens_at);
}

}  // namespace tessera::comm
