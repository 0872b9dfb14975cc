// Tests of checkpoints that ranks save and load: every world size to every other, pruning, LATEST, damaged files,
// failed saves and full disks.
#include <ATen/record_function.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tests/checkpoint/many_saves.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::TempFolder;
using testing::test_device_type;

at::Tensor full_weight() { return at::arange(7 * 3, at::kFloat).view({7, 3}); }

NamedTensors sharded(const std::shared_ptr<comm::World>& world, double scale) {
  const auto mesh = init_device_mesh(world, test_device_type(), {world->size()});
  return {{"weight", distribute_tensor(full_weight() * scale, mesh, {Shard(0)})},
          {"bias", distribute_tensor(at::ones({3}) * scale, mesh, {Replicate()})},
          {"step", at::full({}, scale)}};
}

// A tensor of a dtype that no file can store.
at::Tensor unwritable() { return at::empty({1}, at::kBits8); }

// The kind and message of the Error that `action` throws.
std::pair<ErrorKind, std::string> error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  } catch (const std::exception& error) {
    ADD_FAILURE() << "no Error: " << error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorKind::kInternal, ""};
}

#define EXPECT_ERROR(expected_kind, expected_part, ...)                           \
  do {                                                                            \
    const auto [kind, message] = error_of([&] { __VA_ARGS__; });                  \
    EXPECT_EQ(to_string(kind), std::string(to_string(expected_kind))) << message; \
    EXPECT_NE(message.find(expected_part), std::string::npos) << message;         \
  } while (false)

std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

void flip_last_byte(const std::filesystem::path& file) {
  auto bytes = read_file(file);
  bytes.back() ^= 1;
  publish_file(file, bytes);
}

void save(const std::filesystem::path& folder, int ranks, bool async, int64_t step = 5, double scale = 1) {
  testing::run_ranks({.size = ranks}, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointWriter writer({.folder = folder, .world = world, .keep_last = 2, .async = async});
    writer.save(step, sharded(world, scale), {{"data", 11}});
    writer.finish();
  });
}

TEST(Checkpoint, SavedOnAnyWorldSizeLoadsOnAnyOther) {
  for (const int writers : {1, 2, 4}) {
    TempFolder folder;
    save(folder.path(), writers, writers == 2);
    for (const int readers : {1, 3}) {
      testing::run_ranks({.size = readers}, [&](const std::shared_ptr<comm::World>& world) {
        auto into = sharded(world, 0);
        const auto checkpoint = Checkpoint::latest(folder.path());
        ASSERT_TRUE(checkpoint);
        checkpoint->verify();
        checkpoint->load(into);
        EXPECT_EQ(checkpoint->step(), 5);
        EXPECT_EQ(checkpoint->extra().at("data"), 11);
        EXPECT_TRUE(at::equal(full_tensor(into[0].second).cpu(), full_weight())) << writers << " to " << readers;
        EXPECT_TRUE(at::equal(full_tensor(into[1].second).cpu(), at::ones({3})));
        EXPECT_EQ(into[2].second.item<double>(), 1);
      });
    }
  }
}

TEST(Checkpoint, KeepsTheNewestAndNamesItInLatest) {
  TempFolder folder;
  testing::run_ranks({.size = 2}, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointWriter writer({.folder = folder.path(), .world = world, .keep_last = 2, .keep_best = 1});
    const double losses[] = {3, 1, 2, 2, 2};
    for (int64_t step = 1; step <= 5; ++step) writer.save(step, sharded(world, 1), {}, losses[step - 1]);
    writer.finish();
  });
  EXPECT_EQ(names_in(folder.path()),
            (std::set<std::string>{"LATEST", "step-00000002", "step-00000004", "step-00000005"}));
  EXPECT_EQ(read_file(folder / "LATEST"), "step-00000005\n");
}

TEST(Checkpoint, PruningKeepsTheLastPublishedCheckpointWhateverItsStep) {
  TempFolder folder;
  save(folder.path(), 1, false, 12);
  save(folder.path(), 1, false, 24);
  save(folder.path(), 2, false, 3, 7);  // an earlier step, which another writer saves
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"LATEST", "step-00000003", "step-00000024"}));
  EXPECT_EQ(Checkpoint::latest(folder.path())->step(), 3);
  save(folder.path(), 1, false, 4);
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"LATEST", "step-00000003", "step-00000004"}));
}

TEST(Checkpoint, AnExistingStepIsNotOverwritten) {
  TempFolder folder;
  save(folder.path(), 1, false, 5, 1);
  save(folder.path(), 1, false, 5, 2);
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"LATEST", "step-00000005", "step-00000005-2"}));
  auto step = at::zeros({});
  Checkpoint::latest(folder.path())->load({{"step", step}});
  EXPECT_EQ(step.item<double>(), 2);
  Checkpoint::open(folder / "step-00000005").load({{"step", step}});
  EXPECT_EQ(step.item<double>(), 1);
}

TEST(Checkpoint, PruningRemovesOnlyFilesOfSaves) {
  TempFolder folder;
  std::filesystem::create_directories(folder / "step-00000001");  // a folder that no save wrote
  publish_file(folder / "step-00000001" / "theirs", "x");
  std::filesystem::create_directory(folder / "step-notes");
  save(folder.path(), 1, false, 2);
  publish_file(folder / "step-00000002" / "notes.txt", "x");  // and a user's file in one of our checkpoints
  for (const int64_t step : {3, 4, 5}) save(folder.path(), 1, false, step);
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"LATEST", "step-00000001", "step-00000002", "step-00000004",
                                                            "step-00000005", "step-notes"}));
  EXPECT_EQ(read_file(folder / "step-00000001" / "theirs"), "x");
  EXPECT_EQ(read_file(folder / "step-00000002" / "notes.txt"), "x");
}

TEST(Checkpoint, AWriterRemovesOnlyFilesOfKilledSaves) {
  TempFolder folder;
  for (const char* name :
       {".step-00000007.0123456789abcdef.tmp", "step-00000008.tmp", "step-mine.tmp", ".mine.0123456789abcdef.tmp"}) {
    std::filesystem::create_directories(folder / name);
    publish_file(folder / name / "a", "x");
  }
  publish_file(folder / ".LATEST.0123456789abcdef.tmp", "step-");
  const CheckpointWriter writer({.folder = folder.path(), .world = comm::World::single()});
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"step-mine.tmp", ".mine.0123456789abcdef.tmp"}));
}

// A file that is a mount point cannot be removed, not even by root.
TEST(Checkpoint, AFailedPruneDoesNotFailTheSave) {
  TempFolder folder;
  save(folder.path(), 1, false, 1);
  const auto busy = folder / "step-00000001" / "__0_0.distcp";
  if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount(busy.c_str(), busy.c_str(), nullptr, MS_BIND, nullptr) != 0) {
    GTEST_SKIP() << "this user may not mount";
  }
  for (const int64_t step : {2, 3, 4}) save(folder.path(), 1, false, step);  // throws if a save fails
  EXPECT_EQ(Checkpoint::latest(folder.path())->step(), 4);
  EXPECT_FALSE(std::filesystem::exists(folder / "step-00000002"));
  size_t mounted = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
    mounted += entry.path().filename() == busy.filename();
  }
  EXPECT_EQ(mounted, 3u) << "the file could be removed: this test shows nothing";
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
    ::umount2(entry.path().c_str(), MNT_DETACH);
  }
}

TEST(Checkpoint, MismatchedOrMissingTensorsAreErrorsBeforeAnyChange) {
  TempFolder folder;
  save(folder.path(), 1, false);
  const auto checkpoint = Checkpoint::latest(folder.path());
  auto untouched = at::zeros({3});
  EXPECT_ERROR(ErrorKind::kShape, "weight: saved Float [7, 3], the run wants Float [7, 4]",
               checkpoint->load({{"bias", untouched}, {"weight", at::zeros({7, 4})}}));
  EXPECT_ERROR(ErrorKind::kShape, "other: not in ", checkpoint->load({{"bias", untouched}, {"other", at::zeros({1})}}));
  EXPECT_ERROR(ErrorKind::kShape, "bias: saved Float [3], the run wants Double [3]",
               checkpoint->load({{"bias", at::zeros({3}, at::kDouble)}}));
  EXPECT_TRUE(at::equal(untouched, at::zeros({3})));
}

TEST(Checkpoint, ErrorsNameTheDamagedFile) {
  TempFolder folder;
  save(folder.path(), 2, false);
  const auto file = folder / "step-00000005" / "__1_0.distcp";
  const auto bytes = read_file(file);
  flip_last_byte(file);
  EXPECT_ERROR(ErrorKind::kFormat, "__1_0.distcp: hash is ", Checkpoint::latest(folder.path())->verify());
  publish_file(file, bytes.substr(0, bytes.size() - 1));
  EXPECT_ERROR(ErrorKind::kFormat, fmt::format("__1_0.distcp: found {} bytes", bytes.size() - 1),
               Checkpoint::latest(folder.path()));
  publish_file(folder / "step-00000005" / "manifest.json", "{\"format\": 3}");
  EXPECT_ERROR(ErrorKind::kFormat, "step-00000005/manifest.json", Checkpoint::latest(folder.path()));
  publish_file(folder / "LATEST", "step-00000004\n");
  EXPECT_ERROR(ErrorKind::kFormat,
               "step-00000004: is no folder, although LATEST is next to it. Take another checkpoint",
               Checkpoint::latest(folder.path()));
  publish_file(folder / "LATEST", "../elsewhere\n");
  EXPECT_ERROR(ErrorKind::kFormat, "LATEST: does not name a checkpoint", Checkpoint::latest(folder.path()));
}

// When a run resumes, one rank compares each file with its hash, and all ranks get the result.
TEST(Checkpoint, DamageFoundByOneRankIsAnErrorOnAllRanks) {
  TempFolder folder;
  save(folder.path(), 4, false);
  for (const int readers : {1, 2, 3}) {
    for (const int damaged : {0, 3}) {
      const auto file = folder / "step-00000005" / fmt::format("__{}_0.distcp", damaged);
      flip_last_byte(file);
      testing::run_ranks({.size = readers}, [&](const std::shared_ptr<comm::World>& world) {
        EXPECT_ERROR(ErrorKind::kFormat, fmt::format("__{}_0.distcp: hash is ", damaged),
                     Checkpoint::latest(folder.path(), *world->group()));
        if (readers == 1) return;
        EXPECT_ERROR(ErrorKind::kFormat, fmt::format("rank {}: ", damaged % readers),
                     Checkpoint::latest(folder.path(), *world->group()));
      });
      flip_last_byte(file);
    }
  }
}

// LATEST may change, or differ on another host, before the other ranks read it. Only rank 0's LATEST is used.
TEST(Checkpoint, Rank0ReadsLatestForAllRanks) {
  TempFolder ours, theirs;
  save(ours.path(), 1, false, 7);
  std::filesystem::copy(ours / "step-00000007", theirs / "step-00000007");
  testing::run_ranks({.size = 3}, [&](const std::shared_ptr<comm::World>& world) {
    // Rank 0's folder has LATEST; the folder of the other ranks has none.
    const auto checkpoint = Checkpoint::latest((world->rank() == 0 ? ours : theirs).path(), *world->group());
    ASSERT_TRUE(checkpoint);
    EXPECT_EQ(checkpoint->step(), 7);
  });
  testing::run_ranks({.size = 3}, [&](const std::shared_ptr<comm::World>& world) {
    EXPECT_FALSE(Checkpoint::latest((world->rank() == 0 ? theirs : ours).path(), *world->group()));
  });
}

// Drops the page cache of these files. Returns false if the pages stay, as in a file system in memory.
bool forget(const std::filesystem::path& folder) {
  bool gone = true;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const int file = ::open(entry.path().c_str(), O_RDONLY);
    ::fsync(file);
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    void* memory = ::mmap(nullptr, entry.file_size(), PROT_READ, MAP_SHARED, file, 0);
    std::vector<unsigned char> resident((entry.file_size() + 4095) / 4096);
    gone = gone && ::mincore(memory, entry.file_size(), resident.data()) == 0 &&
           std::ranges::none_of(resident, [](unsigned char page) { return (page & 1) != 0; });
    ::munmap(memory, entry.file_size());
    ::close(file);
  }
  return gone;
}

// Bytes that the host read from a disk for this process.
int64_t bytes_from_disk() {
  const auto text = read_file("/proc/self/io");
  const auto at = text.find("\nread_bytes: ");
  return at == text.npos ? -1 : std::stoll(text.substr(at + 13));
}

// A resuming run compares hashes of whole files, then each rank reads its boxes. Every byte is read from the disk once,
// for any number of ranks on the host.
TEST(Checkpoint, RanksOfAHostReadEachByteOnce) {
  testing::run_ranks({.size = 4, .mode = testing::RankMode::kProcesses}, [](const std::shared_ptr<comm::World>& world) {
    constexpr int64_t kRows = 1024, kColumns = 4096, kBytes = 2 * kRows * kColumns * 4;
    auto& group = *world->group();
    const TempFolder own;
    const std::filesystem::path folder = comm::broadcast_bytes(group, own.path().string());
    const auto mesh = init_device_mesh(world, test_device_type(), {4});
    const auto make = [&](double value) {
      const auto whole = at::full({kRows, kColumns}, value, at::kFloat);
      return NamedTensors{{"wanted_by_all", distribute_tensor(whole, mesh, {Replicate()}, std::nullopt)},
                          {"shards", distribute_tensor(whole, mesh, {Shard(0)}, std::nullopt)}};
    };
    CheckpointWriter writer({.folder = folder, .world = world});
    writer.save(1, make(3), {});
    writer.finish();
    const auto into = make(0);
    const bool cold = world->rank() != 0 || (forget(folder / "step-00000001") && bytes_from_disk() >= 0);
    const auto known = comm::broadcast_bytes(group, cold ? "y" : "n");
    const auto before = bytes_from_disk();
    Checkpoint::latest(folder, group)->load(into);
    const auto read = at::full({1}, bytes_from_disk() - before, at::kLong);
    comm::all_reduce(group, read).wait();
    for (const auto& [name, tensor] : into) EXPECT_TRUE(to_local(tensor).eq(3).all().item<bool>()) << name;
    if (known == "n") return;  // a file system in memory, or a kernel that does not count disk reads
    EXPECT_GT(read.item<int64_t>(), kBytes * 9 / 10) << "the files were in memory: this shows nothing";
    EXPECT_LT(read.item<int64_t>(), kBytes * 11 / 10);
  });
}

// The error of open() or verify() for a folder; "" without an error.
std::string complaint(const std::filesystem::path& folder) {
  try {
    Checkpoint::open(folder).verify();
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.kind()), std::string(to_string(ErrorKind::kFormat))) << error.what();
    return error.what();
  }
}

TEST(Checkpoint, TruncatedOrCorruptFilesAreRefusedByName) {
  TempFolder folder;
  save(folder.path(), 2, false);
  const auto checkpoint = folder / "step-00000005";
  EXPECT_EQ(complaint(checkpoint), "");
  for (const char* name : {"__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"}) {
    const auto whole = read_file(checkpoint / name);
    ASSERT_GT(whole.size(), 300U) << name;
    for (size_t size = 0; size < whole.size(); size += 512) {
      publish_file(checkpoint / name, whole.substr(0, size));
      EXPECT_NE(complaint(checkpoint).find(name), std::string::npos) << name << " cut to " << size << " bytes";
    }
    for (size_t at = 3; at < whole.size(); at += 97) {
      auto changed = whole;
      changed[at] ^= 0x20;
      publish_file(checkpoint / name, changed);
      // Whitespace of the JSON, and unused names in it, may change.
      if (std::string_view(name) == "manifest.json") continue;
      EXPECT_NE(complaint(checkpoint).find(name), std::string::npos) << name << " with byte " << at << " changed";
    }
    std::filesystem::remove(checkpoint / name);
    EXPECT_NE(complaint(checkpoint).find(name), std::string::npos) << name << " removed";
    publish_file(checkpoint / name, whole);
  }
  EXPECT_EQ(complaint(checkpoint), "");
}

TEST(Checkpoint, AFailedSaveKeepsTheOlderCheckpointAndLeavesNoPartialFiles) {
  TempFolder folder;
  save(folder.path(), 2, false);
  testing::run_ranks({.size = 2}, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointWriter writer({.folder = folder.path(), .world = world, .async = false});
    auto tensors = sharded(world, 2);
    const std::string long_name(1 << 10, 'x');
    tensors.emplace_back(long_name, unwritable());
    EXPECT_THROW(writer.save(6, tensors, {}), Error);
  });
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"LATEST", "step-00000005"}));
  EXPECT_EQ(Checkpoint::latest(folder.path())->step(), 5);
}

// The folder is its own file system, which is first full, then read-only.
TEST(Checkpoint, FullAndReadOnlyDisksKeepThePublishedCheckpoint) {
  TempFolder temp;
  const auto folder = temp / "disk";
  std::filesystem::create_directories(folder);
  if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("none", folder.c_str(), "tmpfs", 0, "size=256k") != 0) {
    GTEST_SKIP() << "this user may not mount";
  }
  save(folder, 2, false);
  const auto expect_refused = [&](const NamedTensors& more, const std::string& reason) {
    testing::run_ranks({.size = 2}, [&](const std::shared_ptr<comm::World>& world) {
      CheckpointWriter writer({.folder = folder, .world = world});
      auto tensors = sharded(world, 2);
      tensors.insert(tensors.end(), more.begin(), more.end());
      EXPECT_ERROR(ErrorKind::kIo, reason, writer.save(6, tensors, {}), writer.finish());
    });
    EXPECT_EQ(names_in(folder), (std::set<std::string>{"LATEST", "step-00000005"}));
    const auto checkpoint = Checkpoint::latest(folder);
    EXPECT_EQ(checkpoint->step(), 5);
    checkpoint->verify();
  };
  expect_refused({{"large", at::ones({1 << 20})}}, "No space left on device");
  ASSERT_EQ(::mount("none", folder.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr), 0);
  expect_refused({}, "Read-only file system");
  ::umount2(folder.c_str(), MNT_DETACH);
}

TEST(Checkpoint, AFailedSaveIsReportedBeforeTheNextSave) {
  TempFolder folder;
  testing::run_ranks({.size = 2}, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointWriter writer({.folder = folder.path(), .world = world, .async = true});
    writer.save(1, sharded(world, 1), {});
    auto tensors = sharded(world, 2);
    tensors.emplace_back("odd", unwritable());  // one rank writes this tensor
    EXPECT_FALSE(writer.failed());
    try {
      writer.save(2, tensors, {});
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
      return;
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!writer.failed() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_TRUE(writer.failed());
    try {
      writer.finish();
      ADD_FAILURE() << "no error on rank " << world->rank();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("not saved: rank"), std::string::npos) << error.what();
    }
    EXPECT_FALSE(writer.failed());
    writer.save(3, sharded(world, 3), {});
    writer.finish();
  });
  EXPECT_EQ(Checkpoint::latest(folder.path())->step(), 3);
}

TEST(Checkpoint, TwoWritersOfOneWorldAreIndependent) {
  TempFolder good, bad;
  testing::run_ranks({.size = 2}, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointWriter first({.folder = good.path(), .world = world, .async = true});
    CheckpointWriter second({.folder = bad.path(), .world = world, .async = true});
    first.save(1, sharded(world, 1), {});
    first.finish();
    auto tensors = sharded(world, 2);
    tensors.emplace_back("odd", unwritable());
    second.save(1, tensors, {});
    EXPECT_THROW(second.finish(), Error);  // the failed save belongs to this writer, not to `first`
    first.save(2, sharded(world, 2), {});
    second.save(2, sharded(world, 4), {});
    second.finish();
    first.finish();
  });
  for (const auto& [folder, scale] : {std::pair(&good, 2.0), std::pair(&bad, 4.0)}) {
    const auto checkpoint = Checkpoint::latest(folder->path());
    ASSERT_TRUE(checkpoint);
    EXPECT_EQ(checkpoint->step(), 2);
    auto weight = at::zeros({7, 3});
    checkpoint->load({{"weight", weight}});
    EXPECT_TRUE(at::equal(weight, full_weight() * scale));
  }
}

// Placements that cannot be saved are an error at once. The next save does not wait for this save, which never began.
TEST(Checkpoint, ATensorThatCannotBeSavedLeavesTheWriterUsable) {
  TempFolder folder;
  comm::run_thread_ranks(2,
                         [&](const std::shared_ptr<comm::World>& world) {
                           CheckpointWriter writer({.folder = folder.path(), .world = world});
                           const auto mesh = init_device_mesh(world, test_device_type(), {2});
                           const NamedTensors partial = {{"sum", from_local(at::ones({2}), mesh, {Partial()})}};
                           EXPECT_ERROR(ErrorKind::kShape, "sum: placements", writer.save(1, partial, {}));
                           writer.save(2, sharded(world, 1), {});
                           writer.finish();
                         },
                         {.timeout = std::chrono::seconds(20)});
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"LATEST", "step-00000002"}));
}

// Delays the writing of the first tensor: its detach() runs in a thread that is not marked as a rank's thread.
thread_local bool is_rank = false;
std::atomic<bool> delay_next{false};
std::unique_ptr<at::ObserverContext> delay_writer(const at::RecordFunction& call) {
  if (!is_rank && std::string_view(call.name()) == "aten::detach" && delay_next.exchange(false)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  }
  return nullptr;
}

TEST(Checkpoint, WritingMayTakeLongerThanTheCollectiveTimeout) {
  TempFolder folder;
  const auto callback =
      at::addGlobalCallback(at::RecordFunctionCallback(&delay_writer).scopes({at::RecordScope::FUNCTION}));
  comm::run_thread_ranks(2,
                         [&](const std::shared_ptr<comm::World>& world) {
                           is_rank = true;
                           CheckpointWriter writer({.folder = folder.path(), .world = world});
                           writer.save(1, sharded(world, 1), {});
                           writer.finish();
                           comm::barrier(*world->group());
                           if (world->rank() == 0) delay_next = true;
                           comm::barrier(*world->group());
                           writer.save(2, sharded(world, 1), {});
                           writer.finish();
                           EXPECT_FALSE(delay_next);
                         },
                         {.timeout = std::chrono::seconds(1)});
  at::removeCallback(callback);
  EXPECT_EQ(Checkpoint::latest(folder.path())->step(), 2);
}

TESSERA_RANKS_TEST(Saves, DoNotGrowStoreOrMemory, (3)) { expect_no_growth(world, 25, 4096); }

TEST(Checkpoint, LatestIsEmptyWithoutALatestFile) {
  TempFolder folder;
  EXPECT_FALSE(Checkpoint::latest(folder.path()));
}

}  // namespace
}  // namespace tessera
