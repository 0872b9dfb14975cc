// Memory that ranks of one host read from each other in place: the buffers, and collectives that read from them against
// plain computation.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "tessera/comm/shm/channel.h"
#include "tessera/comm/shm/shared_memory.h"
#include "tests/comm/collective_table.h"
#include "tests/comm/shm_faults.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing_faults::run_forked;

// The number of mappings through which this process reads other processes' buffers.
int views() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find(" r--s ") != line.npos && line.find("memfd:tessera") != line.npos;
  }
  return count;
}

bool one_process_each(World& world) {
  const auto processes = all_gather_bytes(*world.group(), std::to_string(::getpid()));
  return world.size() > 1 && processes[0] != processes[1];
}

at::Tensor shared_data_of(Group& group, int64_t count) {
  at::Tensor data = group.backend().allocateTensor(count, at::kFloat);
  return data.copy_(table::data_of(group.rank(), count, at::kFloat));
}

at::Tensor gathered(Group& group, const at::Tensor& own) {
  at::Tensor all = at::empty({own.numel() * group.size()});
  all_gather_into(group, all, own).wait();
  return all;
}

at::Tensor data_of_all(const Group& group, int64_t count) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group.size(); ++rank) parts.push_back(table::data_of(rank, count, at::kFloat));
  return at::cat(parts);
}

TEST(SharedBuffer, IsFoundByAnyAddressInIt) {
  EXPECT_FALSE(shm::find_shared(shm::shared_buffers().allocate(1000).get(), 1000));  // too small to be shared
  const size_t bytes = 200'000;
  const c10::DataPtr memory = shm::shared_buffers().allocate(bytes), other = shm::shared_buffers().allocate(bytes);
  auto* const data = static_cast<std::byte*>(memory.get());
  const auto whole = shm::find_shared(data, bytes), part = shm::find_shared(data + 1000, 5);
  ASSERT_TRUE(whole && part);
  EXPECT_EQ(part->buffer, whole->buffer);
  EXPECT_EQ(part->offset, whole->offset + 1000);
  EXPECT_NE(shm::find_shared(other.get(), bytes)->buffer, whole->buffer);
  EXPECT_FALSE(shm::find_shared(data + bytes, 1 << 20));  // the range ends outside the buffer
  const at::Tensor elsewhere = at::zeros({100'000});
  EXPECT_FALSE(shm::find_shared(elsewhere.const_data_ptr(), 8));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0U);
}

// Runs `look` in a child process. Returns the result of `look`, or 42 for an Error of kind kIo.
template <class Look>
int look_from_child(const Look& look) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    try {
      code = look(::getppid());
    } catch (const Error& error) {
      code = error.kind() == ErrorKind::kIo ? 42 : 98;
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(SharedBuffer, AnotherProcessReadsIt) {
  c10::DataPtr memory = shm::shared_buffers().allocate(100'000);
  auto* const data = static_cast<std::byte*>(memory.get());
  data[70'000] = std::byte{7};
  const auto place = shm::find_shared(data + 70'000, 1);
  EXPECT_EQ(look_from_child([&](pid_t owner) {
              const shm::SharedView view(owner, *place);
              return view.is_freed() ? 97 : static_cast<int>(*view.at(*place));
            }),
            7);
}

TEST(SharedBuffer, ViewOfAFreedBufferIsAnError) {
  c10::DataPtr memory = shm::shared_buffers().allocate(100'000);
  const auto place = shm::find_shared(memory.get(), 1);
  memory.clear();
  const auto look = [&](pid_t owner) {
    const shm::SharedView view(owner, *place);
    return 0;
  };
  EXPECT_EQ(look_from_child(look), 42);  // the buffer is freed
  c10::DataPtr next = shm::shared_buffers().allocate(100'000);
  ASSERT_EQ(shm::find_shared(next.get(), 1)->descriptor, place->descriptor);
  EXPECT_EQ(look_from_child(look), 42);  // the descriptor is now another buffer's
}

TEST(SharedBuffer, FreeReturnsMemoryWhileOthersMapIt) {
  c10::DataPtr memory = shm::shared_buffers().allocate(1 << 20);
  const auto place = shm::find_shared(memory.get(), 1);
  const shm::SharedView view(::getpid(), *place);
  const UniqueFd file(::open(fmt::format("/proc/self/fd/{}", place->descriptor).c_str(), O_RDONLY));
  struct stat status {};
  ASSERT_EQ(::fstat(file.get(), &status), 0);
  EXPECT_GE(status.st_blocks * 512, 1 << 20);
  EXPECT_FALSE(view.is_freed());
  memory.clear();
  ASSERT_EQ(::fstat(file.get(), &status), 0);
  EXPECT_EQ(status.st_blocks, 0);
  EXPECT_TRUE(view.is_freed());
  EXPECT_EQ(*view.at(*place), std::byte{0});  // the read causes no SIGBUS
}

// The table of collectives with all large tensors in shared buffers.
class CollectiveTableInPlace : public testing::RanksTest {
  const table::InSharedBuffers shared_;
};

TEST_P(CollectiveTableInPlace, EqualsAPlainComputation) {
  testing::run_ranks(GetParam(), [](const std::shared_ptr<World>& world) {
    table::check_table(world, "shm", {.sizes = {5, 20'011}, .large_types = {at::kFloat, at::kBFloat16}});
    at::Tensor large = at::ones({table::kLarge});
    all_reduce(*world->group(), large).wait();
    EXPECT_GE(views(), world->size() - 1);
  });
}
INSTANTIATE_TEST_SUITE_P(, CollectiveTableInPlace, ::testing::ValuesIn(table::process_cases({2, 3, 4})),
                         testing::rank_case_name);

TESSERA_RANKS_TEST(SharedBuffers, AreReadInPlaceAndReusedWithoutMappingThemAgain, (2, 3)) {
  Group& group = *world->group();
  constexpr int64_t kCount = 1'000'000;
  at::Tensor own = shared_data_of(group, kCount);
  EXPECT_TRUE(at::equal(gathered(group, own), data_of_all(group, kCount)));
  const int mapped = views();
  if (one_process_each(*world)) {
    EXPECT_EQ(mapped, group.size() - 1);
  }
  for (int step = 1; step < 5; ++step) {
    own.add_(1);  // no other rank reads it any more
    EXPECT_TRUE(at::equal(gathered(group, own), data_of_all(group, kCount) + step));
  }
  EXPECT_EQ(views(), mapped);
  if (one_process_each(*world)) {
    EXPECT_GE(shm::viewed_bytes(), mapped * kCount * sizeof(float));
  }
  for (int step = 0; step < 5; ++step) {  // mappings of freed buffers are removed
    own = shared_data_of(group, kCount);
    EXPECT_TRUE(at::equal(gathered(group, own), data_of_all(group, kCount)));
    barrier(group);
  }
  EXPECT_LE(views(), 2 * mapped);
}

// Rank 1 has its tensor in ordinary memory, the other ranks have theirs in shared buffers.
TESSERA_RANKS_TEST(SharedBuffers, BuffersOnSomeRanksOnlyAreCopied, (2, 3)) {
  Group& group = *world->group();
  constexpr int64_t kCount = 500'000;
  at::Tensor own = shared_data_of(group, kCount * group.size());
  if (group.rank() == 1) own = own.clone();
  EXPECT_TRUE(at::equal(gathered(group, own), data_of_all(group, kCount * group.size())));
  at::Tensor part = at::empty({kCount});
  reduce_scatter_into(group, part, own).wait();
  EXPECT_TRUE(at::equal(
      part, table::plainly_reduced(group.size(), kCount, at::kFloat, table::Red::SUM, kCount * group.rank())));
  at::Tensor sent = at::empty_like(own);
  all_to_all_single(group, sent, own).wait();
  EXPECT_TRUE(at::equal(sent.narrow(0, kCount, 7), table::data_of(1, 7, at::kFloat, kCount * group.rank())));
  all_reduce(group, own).wait();
  EXPECT_TRUE(at::equal(own, table::plainly_reduced(group.size(), own.numel(), at::kFloat, table::Red::SUM)));
}

TEST(SharedBuffers, FallBackToOrdinaryMemoryWhenTheSystemRefuses) {
  const tessera::testing::TempFolder folder;
  const std::string log = (folder.path() / "log").string();
  const auto ends = run_forked(2, 20s, [&](const std::shared_ptr<World>& world) {
    Group& group = *world->group();
    if (::freopen(log.c_str(), "a", stderr) == nullptr) throw std::runtime_error("freopen");
    const rlimit limit{.rlim_cur = 256 * 1024, .rlim_max = 256 * 1024};
    if (group.rank() == 1) ::setrlimit(RLIMIT_FSIZE, &limit);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor own = shared_data_of(group, 500'000);
      if (!at::equal(gathered(group, own), data_of_all(group, 500'000))) throw std::runtime_error("wrong result");
    }
    if (views() != 0) throw std::runtime_error("read in place");
  });
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.message;
  const std::string said = read_file(log, 1 << 16);
  EXPECT_NE(said.find("buffers are not shared with the ranks of this host"), std::string::npos) << said;
  EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
}

TEST(SharedBuffers, LeaveFileDescriptorsForOtherUses) {
  const auto ends = run_forked(1, 20s, [&](const std::shared_ptr<World>&) {
    const rlimit limit{.rlim_cur = 40, .rlim_max = 40};
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) throw std::runtime_error("setrlimit");
    std::vector<c10::DataPtr> buffers;
    int shared = 0;
    for (int i = 0; i < 100; ++i) {
      buffers.push_back(shm::shared_buffers().allocate(100'000));
      shared += shm::find_shared(buffers.back().get(), 1).has_value();
    }
    if (shared > 20 || shared < 10) throw std::runtime_error(std::to_string(shared));
  });
  EXPECT_EQ(ends[0].exit_code, 0) << ends[0].message;
}

TEST(SharedBuffers, InPlaceReadFailsWhenTheGroupIsAborted) {
  const std::shared_ptr<shm::SharedMemory> memory = shm::SharedMemory::create(shm::Layout(2).bytes());
  shm::initialize(*memory, 2);
  shm::ChannelOptions options{.rank = 0, .size = 2, .ranks = {0, 1}, .processes = {::getpid(), ::getpid()}};
  shm::Channel reader(memory, options);
  options.rank = 1;
  shm::Channel owner(memory, options);
  {
    shm::InPlaceRead reading(reader);
    EXPECT_NO_THROW(reading.end());
  }
  shm::InPlaceRead reading(reader);
  owner.abort_group("the owner frees its memory");
  EXPECT_THROW(reading.end(), PeerFailed);
  EXPECT_THROW(shm::InPlaceRead again(reader), PeerFailed);
  EXPECT_FALSE(reader.words(0).readers.are_there());
}

TEST(SharedBuffer, FreeInAForkedProcessKeepsTheBufferOfItsParent) {
  c10::DataPtr memory = shm::shared_buffers().allocate(100'000);
  std::memset(memory.get(), 7, 100'000);
  EXPECT_EQ(look_from_child([&](pid_t) {
              memory.clear();
              return 0;
            }),
            0);
  EXPECT_EQ(static_cast<const char*>(memory.get())[99'999], 7);
}

// Hides this process as a container does that separates processes: the process is not dumpable and loses
// CAP_SYS_PTRACE.
void hide_from_others() {
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  __user_cap_data_struct rights[_LINUX_CAPABILITY_U32S_3] = {};
  bool done = ::syscall(SYS_capget, &header, rights) == 0;
  rights[0].effective &= ~(1U << CAP_SYS_PTRACE);
  rights[0].permitted &= ~(1U << CAP_SYS_PTRACE);
  done = done && ::syscall(SYS_capset, &header, rights) == 0 && ::prctl(PR_SET_DUMPABLE, 0) == 0;
  if (!done) throw std::runtime_error("hiding");
}

TEST(SharedBuffers, AreCopiedWhenProcessesMayNotAccessEachOther) {
  const auto ends = run_forked(2, 20s, [&](const std::shared_ptr<World>& world) {
    hide_from_others();
    Group& group = *world->group();
    if (group.backend().getBackendName() != "shm") throw std::runtime_error("no shared memory");
    const at::Tensor own = shared_data_of(group, 500'000);
    if (!at::equal(gathered(group, own), data_of_all(group, 500'000))) throw std::runtime_error("wrong result");
    if (views() != 0) throw std::runtime_error("read in place");
  });
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.message;
}

}  // namespace
}  // namespace tessera::comm
