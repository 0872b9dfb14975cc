// Faults of a shared-memory group: ranks that are killed, stopped or leave; calls that do not match; no memory.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <cstddef>
#include <iterator>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/comm/shm/handshake.h"
#include "tessera/comm/shm/shared_memory.h"
#include "tests/comm/shm_faults.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing_faults::run_forked;

TEST(ShmFault, RankKilledAtARandomTimeIsNamedByTheOthers) {
  for (uint32_t seed = 0; seed < 20; ++seed) testing_faults::kill_at_random(seed);
}

TEST(ShmFault, RankKilledWhileAllOthersSleepIsDetected) {
  testing_faults::SharedFiles files;
  const auto body = [](const std::shared_ptr<World>& world) {
    barrier(*world->group());
    if (world->rank() == 2) {
      std::this_thread::sleep_for(300ms);
      ::kill(::getpid(), SIGKILL);
    }
    barrier(*world->group());
  };
  const auto ends = run_forked(4, 60s, body, "shm", 50s, &files);
  EXPECT_EQ(files.count(), 1U);  // the shared memory of their group
  EXPECT_EQ(files.still_held(), 0U);
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(ends[rank].exit_code, 4);
    EXPECT_TRUE(testing_faults::names_as_dead(ends[rank].message, 2)) << ends[rank].message;
    EXPECT_LT(ends[rank].seconds, testing::kPromptSeconds);
  }
}

TEST(ShmFault, AStoppedRankIsNamedAtTheTimeout) {
  const auto ends = run_forked(3, 1000ms, [](const std::shared_ptr<World>& world) {
    barrier(*world->group());
    if (world->rank() == 1) ::raise(SIGSTOP);
    all_reduce(*world->group(), at::ones({4}), ReduceOp::kSum, "model.norm").wait();
  });
  EXPECT_EQ(ends[1].exit_code, 137);  // killed by run_forked() when no other rank was left
  for (const int rank : {0, 2}) {
    EXPECT_EQ(ends[rank].exit_code, 4);
    EXPECT_NE(ends[rank].message.find("timed out"), std::string::npos) << ends[rank].message;
    // The watchdog's failure report.
    EXPECT_NE(ends[rank].message.find("rank 1 did not answer"), std::string::npos) << ends[rank].message;
    EXPECT_NE(ends[rank].message.find("model.norm"), std::string::npos) << ends[rank].message;
    EXPECT_LT(ends[rank].seconds, testing::kPromptSeconds);  // includes the timeout of 1 s
  }
}

TEST(ShmFault, RankThatExitsIsDetected) {
  const auto ends = run_forked(3, 60s, [](const std::shared_ptr<World>& world) {
    barrier(*world->group());
    if (world->rank() == 1) return;
    barrier(*world->group());
  });
  EXPECT_EQ(ends[1].exit_code, 0);
  for (const int rank : {0, 2}) {
    EXPECT_EQ(ends[rank].exit_code, 4);
    EXPECT_NE(ends[rank].message.find("rank 1 "), std::string::npos) << ends[rank].message;
    EXPECT_LT(ends[rank].seconds, testing::kPromptSeconds);
  }
}

TEST(ShmFault, AnAbortWakesTheOthers) {
  const auto ends = run_forked(3, 60s, [](const std::shared_ptr<World>& world) {
    barrier(*world->group());
    if (world->rank() == 0) {
      std::this_thread::sleep_for(200ms);
      world->abort();
      std::this_thread::sleep_for(3s);  // so that the others notice the abort, not the end of this rank
      return;
    }
    barrier(*world->group());
  });
  for (const int rank : {1, 2}) {
    EXPECT_EQ(ends[rank].exit_code, 4);
    EXPECT_NE(ends[rank].message.find("rank 0 aborted the group"), std::string::npos) << ends[rank].message;
    EXPECT_LT(ends[rank].seconds, ends[0].seconds - 1);
  }
}

// Returns the message of the Error of kind kComm that `call` must throw.
template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kComm);
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

void expect_both(const std::string& message, const std::string& one, const std::string& other) {
  EXPECT_NE(message.find(one), std::string::npos) << message;
  EXPECT_NE(message.find(other), std::string::npos) << message;
}

TESSERA_RANKS_TEST(ShmDisagreement, DifferentOperationsAreNamedOnEveryRank, (2, 3)) {
  at::Tensor tensor = at::ones({4}), all = at::empty({4 * world->size()});
  Group& group = *world->group();
  const bool odd = world->rank() == 1;
  expect_both(error_of([&] { (odd ? all_gather_into(group, all, tensor) : all_reduce(group, tensor)).wait(); }),
              "all_reduce", "all_gather");
  EXPECT_EQ(tensor.sum().item<float>(), 4.0F);  // no data was moved
}

TESSERA_RANKS_TEST(ShmDisagreement, DifferentSizesAreErrorsOnEveryRank, (2, 3)) {
  at::Tensor tensor = at::ones({world->rank() == 1 ? 300'000 : 299'999});
  error_of([&] { all_reduce(*world->group(), tensor).wait(); });
  error_of([&] { all_reduce(*world->group(), at::ones({1})).wait(); });  // later calls fail too
}

TESSERA_RANKS_TEST(ShmDisagreement, DifferentReductionsAndDtypesAreErrorsOnEveryRank, (2)) {
  const auto first = world->new_group({0, 1}, "first"), second = world->new_group({0, 1}, "second");
  const bool odd = world->rank() == 1;
  at::Tensor tensor = at::ones({4});
  expect_both(error_of([&] { all_reduce(*first, tensor, odd ? ReduceOp::kMax : ReduceOp::kSum).wait(); }), "sum",
              "max");
  error_of([&] { all_reduce(*second, odd ? tensor.to(at::kInt) : tensor).wait(); });
}

TESSERA_RANKS_TEST(ShmDisagreement, DifferentSplitSizesAreNamed, (2)) {
  const bool odd = world->rank() == 1;
  at::Tensor input = at::ones({10}), output = at::empty({odd ? 9 : 10});
  const std::vector<int64_t> sent = {5, 5}, received = odd ? std::vector<int64_t>{4, 5} : sent;
  const std::string message =
      error_of([&] { all_to_all_single(*world->group(), output, input, received, sent).wait(); });
  expect_both(message, "rank 0 sends 20 bytes", "rank 1, which wants 16");
}

TESSERA_RANKS_TEST(ShmDisagreement, DifferentMessageSizesAreNamed, (2)) {
  Group& group = *world->group();
  const bool sends = world->rank() == 0;
  const std::string message = error_of([&] {
    (sends ? send(group, at::ones({300'000}), 1) : recv(group, at::empty({3}), 0)).wait();
    barrier(group);  // the send may end before the receiver sees the size
  });
  EXPECT_NE(message.find("sends 1200000 bytes with tag 0 to rank 1, which wants 12"), std::string::npos) << message;
}

TEST(ShmMemory, FallsBackToGlooWithOneLogLine) {
  const tessera::testing::TempFolder folder;
  const std::string log = (folder.path() / "stderr").string();
  const auto ends = run_forked(
      2, 20s,
      [&](const std::shared_ptr<World>& world) {
        if (world->rank() == 0) {
          if (!std::freopen(log.c_str(), "w", stderr)) throw std::runtime_error("freopen");
          const rlimit limit{.rlim_cur = 64 * 1024, .rlim_max = 64 * 1024};
          ::setrlimit(RLIMIT_FSIZE, &limit);
        }
        at::Tensor tensor = at::ones({4});
        all_reduce(*world->group(), tensor).wait();
        if (world->group()->backend().getBackendName() != "gloo") throw std::runtime_error("not gloo");
        if (tensor[0].item<float>() != 2) throw std::runtime_error("wrong sum");
      },
      "auto");
  EXPECT_EQ(ends[0].exit_code, 0) << ends[0].message;
  EXPECT_EQ(ends[1].exit_code, 0) << ends[1].message;
  const std::string said = read_file(log, 1 << 16);
  EXPECT_NE(said.find("has no shared memory: "), std::string::npos) << said;
  EXPECT_NE(said.find("File too large"), std::string::npos) << said;
  EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
}

TEST(ShmMemory, RequestedButUnavailableIsAConfigError) {
  const auto ends = run_forked(2, 20s, [&](const std::shared_ptr<World>& world) {
    const rlimit limit{.rlim_cur = 64 * 1024, .rlim_max = 64 * 1024};
    if (world->rank() == 0) ::setrlimit(RLIMIT_FSIZE, &limit);
    world->group();
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, 2);
    EXPECT_NE(end.message.find("Use comm.backend=auto or gloo"), std::string::npos) << end.message;
  }
}

// From now on the kernel refuses calls of mmap with the flags of SharedMemory on this thread, and no other calls.
// Returns false if the kernel has no filters for system calls.
bool refuse_shared_mappings() {
  constexpr uint32_t kFlags = MAP_SHARED | MAP_POPULATE;
  sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_mmap, 0, 3),
                          BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[3])),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kFlags, 0, 1),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{.len = static_cast<unsigned short>(std::size(filter)), .filter = filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(ShmMemory, MappingFailureOnOneRankIsReportedOnAllRanks) {
  const auto ends = run_forked(3, 20s, [&](const std::shared_ptr<World>& world) {
    if (world->rank() == 2 && !refuse_shared_mappings()) throw std::runtime_error("no filter");
    const auto met =
        shm::shake_hands(world->store(), {.rank = world->rank(), .size = 3, .ranks = {0, 1, 2}, .timeout = 10s});
    if (met.backend) throw std::runtime_error("met");
    throw std::runtime_error(met.refusal);
  });
  if (ends[2].message == "no filter") {
    GTEST_SKIP() << "this kernel has no filters for system calls";
  }
  for (const auto& end : ends) {
    EXPECT_NE(end.message.find("rank 2: mapping shared memory: Cannot allocate memory"), std::string::npos)
        << end.message;
  }
}

// Checks SharedFiles::still_held(), on which the tests with killed ranks rely.
TEST(ShmMemory, SharedFilesFindsMemoryStillInUse) {
  testing_faults::SharedFiles files;
  auto memory = shm::SharedMemory::create(1 << 16);
  files.see(::getpid());
  EXPECT_EQ(files.count(), 1U);
  EXPECT_EQ(files.still_held(), 1U);
  memory.reset();
  EXPECT_EQ(files.still_held(), 0U);
}

// If the sysctl vm.memfd_noexec is 2, the kernel allows only memory that cannot be executed.
TEST(ShmMemory, IsNotExecutableWhereTheKernelSupportsIt) {
  constexpr unsigned kNeverRun = 0x0008;  // MFD_NOEXEC_SEAL
  const UniqueFd known(::memfd_create("test", MFD_CLOEXEC | kNeverRun));
  const auto memory = shm::SharedMemory::create(1 << 16);
  const int seals = ::fcntl(memory->descriptor(), F_GET_SEALS);
  EXPECT_EQ((seals & 0x0020) != 0, known.get() >= 0);  // F_SEAL_EXEC
}

TEST(ShmMemory, IsUnnamedAndPrivateToTheUser) {
  const auto memory = shm::SharedMemory::create(1 << 16);
  struct stat status {};
  ASSERT_EQ(::fstat(memory->descriptor(), &status), 0);
  EXPECT_EQ(status.st_nlink, 0U);
  EXPECT_EQ(status.st_mode & 0777, 0600U);
  EXPECT_EQ(status.st_blocks * 512, 1 << 16);  // all pages are allocated
  EXPECT_NE(::ftruncate(memory->descriptor(), 100), 0);
}

TESSERA_RANKS_TEST(ShmChoice, SettingsSelectTheBackend, (2)) {
  EXPECT_EQ(world->group()->backend().getBackendName(), "shm");
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THROW(World::create(world->info(), store, {.backend = "carrier-pigeon"}), Error);
}

}  // namespace
}  // namespace tessera::comm
