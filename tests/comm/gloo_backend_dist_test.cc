// Functions of the Gloo back-end that the table of collectives does not test: abort(), and the check that a process is
// a rank of the group.
#include <ATen/ATen.h>
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/backends/gloo_backend.h"
#include "tessera/comm/collectives/collectives.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

// Connections over loopback that do not belong to the back-end. A thread opens them while the back-end is made.
class UnrelatedConnections {
 public:
  UnrelatedConnections() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::bind(listener_, generic, size) != 0 || ::listen(listener_, 16) != 0 ||
        ::getsockname(listener_, generic, &size) != 0) {
      throw std::runtime_error("listening");
    }
    connect_ = [address, size](int end) { return ::connect(end, reinterpret_cast<const sockaddr*>(&address), size); };
    opener_ = std::thread([this] {
      while (!stop_ && count_ < kMost) {
        open_one();
        std::this_thread::sleep_for(100us);
      }
    });
  }
  ~UnrelatedConnections() {
    stop();
    for (const int end : ends_) ::close(end);
    ::close(listener_);
  }
  size_t count() const { return count_; }
  void stop() {
    stop_ = true;
    if (opener_.joinable()) opener_.join();
  }
  size_t broken() const {
    size_t broken = 0;
    for (size_t i = 0; i < ends_.size(); i += 2) {
      char byte = 'x';
      const bool sent = ::send(ends_[i], &byte, 1, MSG_NOSIGNAL) == 1;
      broken += !sent || ::recv(ends_[i + 1], &byte, 1, MSG_DONTWAIT) != 1;
    }
    return broken;
  }

  static constexpr size_t kMost = 200;

 private:
  void open_one() {
    const int end = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect_(end) != 0) throw std::runtime_error("connecting");
    ends_.push_back(end);
    ends_.push_back(::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
    ++count_;
  }
  int listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::function<int(int)> connect_;
  std::vector<int> ends_;
  std::atomic<bool> stop_{false};
  std::atomic<size_t> count_{0};
  std::thread opener_;
};

c10::intrusive_ptr<c10d::Store> part_of(World& world, const std::string& name) {
  return c10::make_intrusive<c10d::PrefixStore>(name, c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world.store()));
}

TESSERA_RANKS_TEST(GlooAbort, EndsWaitsAndKeepsUnrelatedConnectionsOpen, (2, 3)) {
  const auto store = part_of(*world, "gloo_abort");
  UnrelatedConnections unrelated;
  const size_t before = unrelated.count();
  const auto backend =
      make_gloo_backend(store, {.rank = world->rank(), .size = world->size(), .loopback = true, .timeout = 60s});
  while (unrelated.count() == before && before < UnrelatedConnections::kMost) {
    std::this_thread::yield();  // the thread of `unrelated` may not have run yet
  }
  unrelated.stop();
  backend->barrier()->wait();
  std::vector<at::Tensor> tensors = {at::ones({1})};
  c10::intrusive_ptr<c10d::Work> waits;
  if (world->rank() == 0) waits = backend->recv(tensors, 1, 0);
  barrier(*world->group());
  backend->abort();
  EXPECT_EQ(unrelated.broken(), 0U);
  if (waits) {
    EXPECT_ANY_THROW(waits->wait());
  }
  barrier(*world->group());
}

TESSERA_RANKS_TEST(GlooAuthentication, AuthenticatesRanksOfSeveralHosts, (2, 3, 4)) {
  const auto backend = make_gloo_backend(
      part_of(*world, "words"),
      {.rank = world->rank(), .size = world->size(), .loopback = false, .other_host = "127.0.0.1", .timeout = 60s});
  std::vector<at::Tensor> ranks = {at::full({1}, world->rank())};
  backend->allreduce(ranks)->wait();
  EXPECT_EQ(ranks[0].item<int64_t>(), world->size() * (world->size() - 1) / 2);
  barrier(*world->group());
}

// The last rank is a plain Gloo process. It knows the addresses of the other ranks and sends a message of its own,
// without the group's secret. The other ranks must refuse it.
TESSERA_RANKS_TEST(GlooAuthentication, RefusesAProcessWithoutTheGroupSecret, (2, 3)) {
  const auto store = part_of(*world, "stranger");
  const int size = world->size(), last = size - 1;
  if (world->rank() == last) {
    auto options = c10d::ProcessGroupGloo::Options::create(60s);
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    const auto stranger = c10::make_intrusive<c10d::ProcessGroupGloo>(store, last, size, options);
    store->set(fmt::format("listens_at/{}", last), store->get("listens_at/0"));  // a valid address, of rank 0
    auto said = at::full({size}, 4711, at::kLong), heard = at::empty_like(said);
    std::vector<int64_t> even{};
    stranger->alltoall_base(heard, said, even, even)->wait();
    barrier(*world->group());
    return;
  }
  try {
    make_gloo_backend(
        store, {.rank = world->rank(), .size = size, .loopback = false, .other_host = "127.0.0.1", .timeout = 60s});
    ADD_FAILURE() << "rank " << world->rank() << " took a stranger for a rank";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kComm);
    EXPECT_NE(
        std::string(error.what()).find(fmt::format("as rank {} of a new group does not know the group's secret", last)),
        std::string::npos)
        << error.what();
  }
  barrier(*world->group());
}

}  // namespace
}  // namespace tessera::comm
