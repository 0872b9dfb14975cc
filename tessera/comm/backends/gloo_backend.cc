#include "tessera/comm/backends/gloo_backend.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
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

std::set<std::string> open_sockets() {
  std::set<std::string> sockets;
  for_each_socket([&](int, const std::string& socket) { sockets.insert(socket); });
  return sockets;
}

// Gloo has no abort: closing a connection of its own leaves the local waits standing until their timeout. An
// end of file does end them, here and at the peer, so abort() shuts the group's sockets down underneath it.
// They are the ones that appeared while the group was made; with ranks as threads these may include sockets
// of another rank's half of the same world, which is aborted with this one.
class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  GlooBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options,
              const std::set<std::string>& before)
      : ProcessGroupGloo(store, rank, size, std::move(options)) {
    for_each_socket([&](int, const std::string& socket) {
      if (!before.contains(socket)) sockets_.insert(socket);
    });
  }

  void abort() override {
    for_each_socket([&](int descriptor, const std::string& socket) {
      int listens = 0;
      socklen_t length = sizeof listens;
      ::getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length);
      if (!listens && sockets_.contains(socket)) ::shutdown(descriptor, SHUT_RDWR);
    });
  }

 private:
  std::set<std::string> sockets_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(c10::intrusive_ptr<c10d::Store> store, const GlooOptions& options) {
  using c10d::ProcessGroupGloo;
  const auto before = open_sockets();
  auto gloo = ProcessGroupGloo::Options::create(options.timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (options.loopback) {
    gloo->devices.push_back(ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  } else if (interface && *interface) {
    gloo->devices.push_back(ProcessGroupGloo::createDeviceForInterface(interface));
    // What Gloo does by itself, to look up the own host name, gives loopback where that name is not known.
  } else if (const std::string own = address_towards(options.other_host); !own.empty()) {
    gloo->devices.push_back(ProcessGroupGloo::createDeviceForHostname(own));
  } else {
    gloo->devices.push_back(ProcessGroupGloo::createDefaultDevice());
  }
  return c10::make_intrusive<GlooBackend>(store, options.rank, options.size, std::move(gloo), before);
}

}  // namespace tessera::comm
