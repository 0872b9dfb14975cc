// Tests of the cache of tokenized data: an entry is found again at the next start, is made again when the data or the
// settings change, and is not used when it is incomplete.
#include "tessera/data/rows/cache.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <atomic>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/machine/host.h"
#include "tessera/data/rows/cache_lock.h"
#include "tessera/data/rows/dataset.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/support/few_descriptors.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

using tessera::testing::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CacheTest : public ::testing::Test {
 protected:
  CacheTest() { write("a.jsonl", lines("a")); }

  static std::string lines(const std::string& word) {
    std::string text;
    for (int i = 0; i < 40; ++i) text += fmt::format("{{\"text\": \"{} {}\"}}\n", word, i);
    return text;
  }
  std::string write(const std::string& name, const std::string& content) {
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return (folder_ / name).string();
  }
  std::filesystem::path cache() const { return folder_ / "cache"; }
  std::shared_ptr<const Dataset> load(DataOptions options = {}) {
    if (options.sources.empty()) options.sources = {(folder_ / "a.jsonl").string()};
    options.sequence_length = 32;
    options.cache_folder = cache();
    options.quiet = true;
    return Dataset::load(options, tokenizer_, std::nullopt);
  }
  // The entries, with the times at which they were made.
  std::set<std::pair<std::string, std::filesystem::file_time_type>> entries() const {
    std::set<std::pair<std::string, std::filesystem::file_time_type>> found;
    for (const auto& entry : std::filesystem::directory_iterator(cache())) {
      const auto set = entry.path() / "set.json";
      if (std::filesystem::exists(set)) {
        found.emplace(entry.path().filename().string(), std::filesystem::last_write_time(set));
      }
    }
    return found;
  }
  std::filesystem::path entry() const { return cache() / entries().begin()->first; }
  static std::vector<int64_t> tokens(const Dataset& set) {
    std::vector<int64_t> rows(static_cast<size_t>(set.rows()));
    std::iota(rows.begin(), rows.end(), 0);
    const auto batch = set.rows(rows);
    return {batch.tokens.const_data_ptr<int64_t>(), batch.tokens.const_data_ptr<int64_t>() + batch.tokens.numel()};
  }

  TempFolder folder_;
  text::Tokenizer tokenizer_ = make_byte_tokenizer(folder_.path());
};

TEST_F(CacheTest, ASecondLoadReusesTheEntryOfTheFirst) {
  const auto first = load();
  const auto made = entries();
  ASSERT_EQ(made.size(), 1u);
  const auto second = load();
  EXPECT_EQ(entries(), made);
  EXPECT_EQ(second->fingerprint(), first->fingerprint());
  EXPECT_EQ(second->stats().label_tokens, first->stats().label_tokens);
  EXPECT_EQ(tokens(*second), tokens(*first));
  DataOptions off;
  off.sources = {(folder_ / "a.jsonl").string()};
  off.sequence_length = 32;
  const auto without = Dataset::load(off, tokenizer_, std::nullopt);
  EXPECT_EQ(without->fingerprint(), first->fingerprint());
  EXPECT_EQ(tokens(*without), tokens(*first));
}

TEST_F(CacheTest, StoresCountsOfTruncatedAndUnlabelledSamples) {
  write("b.jsonl", "{\"prompt\": \"" + std::string(40, 'p') + "\", \"completion\": \"c\"}\n" +
                       "{\"prompt\": \"p\", \"completion\": \"" + std::string(40, 'c') + "\"}\n");
  for (int start = 0; start < 2; ++start) {
    const auto stats = load({.sources = {(folder_ / "b.jsonl").string()}})->stats();
    EXPECT_EQ(stats.truncated, 2);
    EXPECT_EQ(stats.unlabelled, 1);
    EXPECT_EQ(stats.cut_away, 1);
  }
  ASSERT_EQ(entries().size(), 1u);
  // An older version did not count cut_away.
  const auto set = entry() / "set.json";
  auto json = nlohmann::json::parse(read_file(set));
  json.erase("cut_away");
  publish_file(set, json.dump());
  EXPECT_EQ(load({.sources = {(folder_ / "b.jsonl").string()}})->stats().cut_away, 0);
  EXPECT_EQ(entries().size(), 1u);
}

TEST_F(CacheTest, KeyDependsOnContentTokenizerAndSettingsNotTheFileName) {
  load();
  std::filesystem::copy_file(folder_ / "a.jsonl", folder_ / "b.jsonl");
  load({.sources = {(folder_ / "b.jsonl").string()}});
  EXPECT_EQ(entries().size(), 1u) << "the same content under another name";
  load({.sources = {}, .tokenizer_identity = "another"});
  EXPECT_EQ(entries().size(), 2u);
  load({.sources = {}, .train_on_inputs = true});
  load({.sources = {}, .seed = 43});
  load({.sources = {}, .vocab_size = 300});
  EXPECT_EQ(entries().size(), 5u);
  write("a.jsonl", lines("b"));  // the same length as before
  load();
  EXPECT_EQ(entries().size(), 6u);
}

TEST_F(CacheTest, ContentIsHashedOnceUntilTheFileChanges) {
  const DataCache kept(cache());
  const auto path = folder_ / "a.jsonl";
  const auto hash = kept.content_hash(path);
  EXPECT_FALSE(std::filesystem::exists(cache() / "files")) << "a file written just now may change without a sign";
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  EXPECT_EQ(kept.content_hash(path), hash);
  const auto memo = std::filesystem::directory_iterator(cache() / "files")->path();
  auto json = nlohmann::ordered_json::parse(read_file(memo));
  EXPECT_EQ(json["hash"], hash);
  json["hash"] = std::string(32, '0');  // a start that does not read the file gives this hash
  write("memo", json.dump());
  std::filesystem::rename(folder_ / "memo", memo);
  EXPECT_EQ(kept.content_hash(path), std::string(32, '0'));
  write("a.jsonl", lines("b"));
  EXPECT_NE(kept.content_hash(path), std::string(32, '0'));
  std::ofstream(memo) << "{\"half";
  EXPECT_NE(kept.content_hash(path), hash);
}

TEST_F(CacheTest, EntriesThatAreIncompleteOrOfAnotherVersionAreRebuilt) {
  const auto wanted = tokens(*load());
  const auto name = entry();
  const auto spoil = [&](const std::function<void()>& damage) {
    damage();
    EXPECT_EQ(tokens(*load()), wanted);
    EXPECT_EQ(entry(), name);
  };
  spoil([&] { std::filesystem::resize_file(name / "tokens.bin", 100); });
  spoil([&] { std::filesystem::remove(name / "order.bin"); });
  spoil([&] { std::filesystem::remove(name / "set.json"); });
  spoil([&] { std::ofstream(name / "set.json") << "{\"version\": 1,"; });
  spoil([&] {
    auto set = nlohmann::ordered_json::parse(read_file(name / "set.json"));
    set["version"] = 2;
    std::ofstream(name / "set.json") << set;
  });
  spoil([&] {
    auto set = nlohmann::ordered_json::parse(read_file(name / "set.json"));
    set["key"] = std::string(32, 'f');
    std::ofstream(name / "set.json") << set;
  });
  spoil([&] {  // the state that a killed process leaves
    std::filesystem::rename(name, cache() / ("." + name.filename().string() + ".0123456789abcdef.tmp"));
  });
  for (const auto& left : std::filesystem::directory_iterator(cache())) EXPECT_NE(left.path().extension(), ".tmp");
}

TEST_F(CacheTest, CorruptSamplesAreErrorsWhenTheyAreRead) {
  load();
  {
    std::fstream file(entry() / "tokens.bin", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(8);
    file.put('\x7f');
  }
  const auto set = load();
  try {
    tokens(*set);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    EXPECT_THAT(error.what(), AllOf(HasSubstr(entry().string()), HasSubstr("sample 0 has another hash"),
                                    HasSubstr("Remove the folder")));
  }
  const auto open = load();
  std::filesystem::resize_file(entry() / "samples.bin", 0);
  try {
    tokens(*open);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("samples.bin ends at byte"));
  }
}

TEST_F(CacheTest, AFileThatChangesWhileItIsReadIsAnErrorAndLeavesNoEntry) {
  const auto path = folder_ / "a.jsonl";
  const UnchangedFiles files({path});
  files.check();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::ofstream(path, std::ios::app) << "{\"text\": \"more\"}\n";
  try {
    DataCache(cache()).open_or_make("0123", [&](const std::filesystem::path& folder) {
      std::ofstream(folder / "begun") << "x";
      files.check();
    });
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("a.jsonl: changed while it was read")));
  }
  EXPECT_TRUE(entries().empty());
  for (const auto& left : std::filesystem::directory_iterator(cache())) EXPECT_NE(left.path().extension(), ".tmp");
}

TEST_F(CacheTest, ConcurrentLoadsMakeAnEntryOnce) {
  std::vector<std::thread> starts;
  std::vector<std::string> fingerprints(6);
  for (auto& fingerprint : fingerprints) starts.emplace_back([&] { fingerprint = load()->fingerprint(); });
  for (auto& one : starts) one.join();
  EXPECT_EQ(std::set<std::string>(fingerprints.begin(), fingerprints.end()).size(), 1u);
  EXPECT_EQ(entries().size(), 1u);
}

std::string key(char digit) { return std::string(32, digit); }

TEST_F(CacheTest, PrunesOldAndExcessEntriesButNoOpenOrForeignOnes) {
  const auto first = load();
  const auto template_of_entry = entry();
  const auto make = [&](char digit, int days) {
    const auto folder = cache() / key(digit);
    std::filesystem::copy(template_of_entry, folder);
    auto set = nlohmann::ordered_json::parse(read_file(folder / "set.json"));
    set["key"] = key(digit);
    std::ofstream(folder / "set.json") << set;
    const timespec at{::time(nullptr) - days * 24 * 3600, 0};
    const timespec both[] = {at, at};
    for (const char* name : {"set.json", "maker"}) {
      ASSERT_EQ(::utimensat(AT_FDCWD, (folder / name).c_str(), both, 0), 0);
    }
  };
  make('1', 40);
  make('2', 40);
  make('3', 2);
  make('4', 1);
  std::filesystem::create_directories(cache() / key('5'));  // a foreign folder that has such a name
  std::ofstream(cache() / key('5') / "set.json") << R"({"mine": 1})";
  std::filesystem::create_directories(cache() / "notes");
  const auto used = PackedRows::open(cache() / key('2'), key('2'));
  ASSERT_TRUE(used);
  const timespec long_ago[] = {{0, 0}, {0, 0}};
  EXPECT_EQ(::utimensat(AT_FDCWD, (cache() / key('2') / "maker").c_str(), long_ago, 0), 0);
  const auto there = [&](char digit) { return std::filesystem::exists(cache() / key(digit)); };
  DataCache(cache()).prune();
  EXPECT_FALSE(there('1')) << "unused for 40 days";
  EXPECT_TRUE(there('2')) << "in use";
  EXPECT_TRUE(there('3') && there('4'));
  uint64_t bytes = 0;
  for (const auto& file : std::filesystem::directory_iterator(template_of_entry)) bytes += file.file_size();
  DataCache(cache(), {.bytes = 3 * bytes + 10 * 64}).prune();  // room for three of the four remaining entries
  EXPECT_FALSE(there('3')) << "the one that was used longest ago, but for the one in use";
  EXPECT_TRUE(there('2') && there('4'));
  DataCache(cache(), {.bytes = 0}).prune();
  EXPECT_FALSE(there('4'));
  EXPECT_TRUE(there('2') && there('5') && std::filesystem::exists(cache() / "notes"));
  EXPECT_EQ(tokens(*first), tokens(*load()));
  int samples = 0;
  used->read(0, [&](std::span<const PackedToken>) { ++samples; });
  EXPECT_GT(samples, 0);
}

TEST_F(CacheTest, WithoutSharedLocksTheFirstPublishedEntryIsUsed) {
  const auto wanted = tokens(*load());
  const auto name = entry();
  const auto theirs = folder_ / "theirs";
  std::filesystem::rename(name, theirs);
  const auto rows = DataCache(cache()).open_or_make(name.filename(), [&](const std::filesystem::path& folder) {
    std::ofstream(folder / "begun") << "x";
    std::filesystem::rename(theirs, name);  // another host was faster
  });
  EXPECT_GT(rows->rows(), 0);
  EXPECT_FALSE(std::filesystem::exists(name / "begun"));
  EXPECT_EQ(tokens(*load()), wanted);
}

TEST_F(CacheTest, AnUnfinishedEntryOfAnotherHostIsKeptUntilItIsStale) {
  load();
  const auto name = entry();
  const auto making = cache() / ("." + name.filename().string() + ".0123456789abcdef.tmp");
  std::filesystem::rename(name, making);
  std::ofstream(making / "maker") << "another-host";
  load();
  EXPECT_TRUE(std::filesystem::exists(making)) << "it was touched just now";
  const timespec old[] = {{1000, 0}, {1000, 0}};
  for (const auto& file : std::filesystem::directory_iterator(making)) {
    ASSERT_EQ(::utimensat(AT_FDCWD, file.path().c_str(), old, 0), 0);
  }
  ASSERT_EQ(::utimensat(AT_FDCWD, making.c_str(), old, 0), 0);
  std::filesystem::remove_all(name);
  load();
  EXPECT_FALSE(std::filesystem::exists(making));
}

TEST_F(CacheTest, AFileThatChangesAfterLoadingIsReported) {
  const auto set = load();
  EXPECT_EQ(set->changed_file(), std::nullopt);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::filesystem::permissions(folder_ / "a.jsonl", std::filesystem::perms::owner_read);
  std::filesystem::create_hard_link(folder_ / "a.jsonl", folder_ / "the same");
  EXPECT_EQ(set->changed_file(), std::nullopt) << "its content is what it was";
  std::filesystem::permissions(folder_ / "a.jsonl", std::filesystem::perms::owner_all);
  write("a.jsonl", lines("c"));
  EXPECT_EQ(set->changed_file(), folder_ / "a.jsonl");
  std::filesystem::remove(folder_ / "a.jsonl");
  EXPECT_EQ(set->changed_file(), folder_ / "a.jsonl");
}

TEST_F(CacheTest, StopFlagStopsTokenization) {
  const std::atomic<bool> stop{true};
  try {
    load({.sources = {}, .stop = &stop});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("a.jsonl line 1: asked to stop"));
  }
  EXPECT_TRUE(entries().empty());
}

TEST_F(CacheTest, PrunesUnusedFilesOfKilledProcesses) {
  const auto held = load();
  const auto name = entry().filename().string();
  const auto leave = [&](const std::string& what, const std::string& maker) {
    const auto folder = cache() / what;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "tokens.bin") << "half";
    std::ofstream(folder / "maker") << maker;
    return folder;
  };
  std::ofstream(cache() / (key('1') + ".lock")) << "";
  std::ofstream(cache() / (key('2') + ".lock")) << "";
  const auto killed = leave("." + key('1') + ".0123456789abcdef.tmp", host_name());
  const auto elsewhere = leave("." + key('1') + ".1123456789abcdef.tmp", "another-host");
  const auto at_work = leave("." + key('2') + ".0123456789abcdef.tmp", host_name());
  const auto aside = leave("." + key('3') + ".0123456789abcdef.old", host_name());
  const auto of_others = leave("." + key('3') + ".notes", host_name());
  const UniqueFd working = open_to_lock(cache() / (key('2') + ".lock"), 0);
  ASSERT_EQ(try_lock(working), LockState::kHeld);
  const auto in_use = cache() / ("." + name + ".2123456789abcdef.old");
  std::filesystem::rename(cache() / name, in_use);  // `held` still has the entry open
  DataCache(cache()).prune();
  EXPECT_FALSE(std::filesystem::exists(killed));
  EXPECT_TRUE(std::filesystem::exists(elsewhere));
  EXPECT_TRUE(std::filesystem::exists(at_work));
  EXPECT_FALSE(std::filesystem::exists(aside));
  EXPECT_TRUE(std::filesystem::exists(of_others));
  EXPECT_TRUE(std::filesystem::exists(in_use));
  EXPECT_FALSE(tokens(*held).empty());
}

TEST_F(CacheTest, WithHostLocalLocksPrunesOnlyEntriesOfThisHost) {
  load();
  const auto template_of_entry = entry();
  const timespec long_ago[] = {{1000, 0}, {1000, 0}};
  const auto make = [&](char digit, const std::string& maker) {
    const auto folder = cache() / key(digit);
    std::filesystem::copy(template_of_entry, folder);
    auto set = nlohmann::ordered_json::parse(read_file(folder / "set.json"));
    set["key"] = key(digit);
    std::ofstream(folder / "set.json") << set;
    std::ofstream(folder / "maker") << maker;
    for (const char* name : {"set.json", "maker"}) {
      ASSERT_EQ(::utimensat(AT_FDCWD, (folder / name).c_str(), long_ago, 0), 0);
    }
  };
  make('1', host_name());
  make('2', "another-host");
  const DataCache shared(cache(), {.bytes = 0, .locks_reach_all_hosts = false});
  shared.prune();
  EXPECT_FALSE(std::filesystem::exists(cache() / key('1')));
  EXPECT_TRUE(std::filesystem::exists(cache() / key('2'))) << "its maker may have it open";
  EXPECT_TRUE(std::filesystem::exists(template_of_entry)) << "used just now, maybe on another host";
  DataCache(cache(), {.bytes = 0, .locks_reach_all_hosts = true}).prune();
  EXPECT_FALSE(std::filesystem::exists(cache() / key('2')));
  EXPECT_FALSE(std::filesystem::exists(template_of_entry));
}

TEST(CacheLock, IsOpenedForWritingAndDistinguishesBusyFromUnsupported) {
  const TempFolder folder;
  const auto path = folder / "lock";
  const UniqueFd one = open_to_lock(path, O_CREAT), other = open_to_lock(path, 0);
  ASSERT_TRUE(one.open() && other.open());
  EXPECT_EQ(::fcntl(one.get(), F_GETFL) & O_ACCMODE, O_RDWR);  // NFS gives exclusive locks to writers only
  EXPECT_EQ(try_lock(one), LockState::kHeld);
  EXPECT_EQ(try_lock(other), LockState::kBusy);
  const UniqueFd unlockable(::open(path.c_str(), O_PATH | O_CLOEXEC));  // fails with EBADF, as without locks
  EXPECT_EQ(try_lock(unlockable), LockState::kNoLocks);
  for (const int64_t network : {0x6969L, 0x0BD00BD0L, 0xFF534D42L, static_cast<long>(static_cast<int32_t>(0xFE534D42)),
                                0x65735546L, 0x47504653L, 0x19830326L}) {
    EXPECT_FALSE(locks_reach_all_hosts_on(network)) << std::hex << network;
  }
  for (const int64_t local : {0xEF53L, 0x58465342L, 0x01021994L, 0x794C7630L}) {  // ext4, XFS, tmpfs, overlay
    EXPECT_TRUE(locks_reach_all_hosts_on(local)) << std::hex << local;
  }
}

TEST_F(CacheTest, AnEntryThatTemporarilyCannotBeOpenedIsNotRebuilt) {
  load();
  const auto made = entries();
  const auto name = entry().filename().string();
  std::string said;
  try {
    const testing::FewDescriptors none;
    DataCache(cache()).open_or_make(name, [](const std::filesystem::path&) { ADD_FAILURE() << "made again"; });
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    said = error.what();
  }
  EXPECT_THAT(said, AllOf(HasSubstr("set.json"), HasSubstr("Too many open files")));
  EXPECT_EQ(entries(), made);
  load();
  EXPECT_EQ(entries(), made);
}

TEST_F(CacheTest, StopFlagEndsTheWaitForAnotherProcess) {
  std::filesystem::create_directories(cache());
  const UniqueFd working = open_to_lock(cache() / (key('7') + ".lock"), O_CREAT);
  ASSERT_EQ(try_lock(working), LockState::kHeld);
  std::atomic<bool> stop{false};
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    stop = true;
  });
  try {
    DataCache(cache()).open_or_make(
        key('7'), [](const std::filesystem::path&) { ADD_FAILURE() << "made beside the other"; }, &stop);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("asked to stop while another process makes it"));
  }
  later.join();
}

TEST_F(CacheTest, ADamagedEntryThatIsOpenIsMovedNotRemoved) {
  const auto held = load();
  const auto name = entry().filename();
  { std::ofstream(cache() / name / "set.json", std::ios::app) << "damage"; }
  load();
  EXPECT_FALSE(tokens(*held).empty());
  int aside = 0;
  for (const auto& found : std::filesystem::directory_iterator(cache())) aside += found.path().extension() == ".old";
  EXPECT_EQ(aside, 1) << "held has it open";
}

}  // namespace
}  // namespace tessera::data
