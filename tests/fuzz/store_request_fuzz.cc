// Fuzz target: any bytes as the messages of a connection to the store of a run. If the first byte is odd, a valid hello
// precedes the messages. The server must continue to answer other connections.
#include <arpa/inet.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "tessera/base/machine/listen.h"
#include "tessera/comm/rendezvous/run_store.h"
#include "tessera/comm/rendezvous/run_store_protocol.h"
#include "tessera/comm/rendezvous/run_store_server.h"
#include "tests/fuzz/input_file.h"

namespace {

using namespace tessera;
using namespace tessera::comm;

struct Hub {
  int port;
  std::shared_ptr<RunStoreServer> server;
  c10::intrusive_ptr<RunStore> other;
  Hub() {
    ListeningSocket here = listen_at("127.0.0.1", 0, ListenScope::kThisHost);
    port = here.port;
    const RunIdentity identity{.token = "t", .run = "r", .who = "rank 0"};
    server = std::make_shared<RunStoreServer>(std::move(here.socket), identity);
    other = c10::make_intrusive<RunStore>(RunStoreAddress{.host = "127.0.0.1", .port = port}, identity,
                                          std::chrono::seconds(30));
  }
};

// The side that closes a connection keeps its port for a minute, so after about 28,000 runs no port may be free.
// SO_LINGER with 0 seconds frees the port at once.
UniqueFd connected(int port) {
  const linger no_wait{.l_onoff = 1, .l_linger = 0};
  sockaddr_in address{
      .sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(port)), .sin_addr = {}, .sin_zero = {}};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (int time = 0; time < 700; ++time) {
    UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &no_wait, sizeof no_wait);
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return socket;
    if (errno != EADDRNOTAVAIL) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  std::perror("connect");
  std::abort();
}

void send_all(int socket, std::string_view bytes) {
  while (!bytes.empty()) {
    const auto sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;  // the server has closed the connection
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static std::unique_ptr<Hub> hub;
  static int runs = 0;
  if (runs++ % 10000 == 0) hub = std::make_unique<Hub>();  // a new server has an empty store
  const UniqueFd socket = connected(hub->port);
  if (size > 0 && (data[0] & 1) != 0) {
    send_all(socket.get(),
             FrameWriter(RunStoreRequest::kHello).put(int64_t{kStoreMagic}).put("t").put("r").put("rank 1").finish());
  }
  if (size > 1) send_all(socket.get(), fuzz::text_of(data + 1, size - 1));
  ::shutdown(socket.get(), SHUT_WR);
  char answer[4096];
  while (::recv(socket.get(), answer, sizeof answer, 0) > 0) {
  }
  if (hub->other->getNumKeys() < 0) std::abort();
  return 0;
}
