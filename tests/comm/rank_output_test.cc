// Where the output of ranks goes: how much at once, and without the kernel's notices.
#include "tessera/comm/launch/rank_output.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "tessera/base/file.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

// Standard output in a file while it lives.
class Captured {
 public:
  explicit Captured(const std::filesystem::path& path) : path_(path), before_(::dup(STDOUT_FILENO)) {
    std::fflush(stdout);
    const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    ::dup2(file.get(), STDOUT_FILENO);
  }
  ~Captured() {
    std::fflush(stdout);
    ::dup2(before_.get(), STDOUT_FILENO);
  }
  std::string text() const { return read_file(path_); }

 private:
  std::filesystem::path path_;
  UniqueFd before_;
};

void say(int to, const std::string& text) {
  ASSERT_EQ(::write(to, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

TEST(RankOutputs, ShowAPartOfALotAndComeBackForTheRest) {
  const testing::TempFolder folder;
  RankOutputs outputs({.tee = true}, "run");
  outputs.begin_attempt(0, folder.path());
  const auto streams = outputs.open(0, 0);
  EXPECT_EQ(outputs.look_again_after(), std::nullopt);
  std::string line(100, 'x'), lines;
  line.back() = '\n';
  while (lines.size() < size_t{5} << 20) lines += line;
  say(streams.out, lines + "begun");
  const Captured shown(folder / "shown");
  outputs.pump();
  const size_t first = shown.text().size();
  EXPECT_GT(first, size_t{1} << 20);
  EXPECT_LT(first, size_t{2} << 20);
  EXPECT_EQ(outputs.look_again_after(), milliseconds(0));
  for (int i = 0; i < 20 && outputs.look_again_after(); ++i) outputs.pump();
  EXPECT_EQ(outputs.look_again_after(), std::nullopt);
  outputs.finish();
  const std::string text = shown.text();
  EXPECT_EQ(static_cast<size_t>(std::count(text.begin(), text.end(), '\n')), lines.size() / 100 + 1);
  EXPECT_TRUE(text.ends_with("[rank0]: begun\n"));
}

TEST(RankOutputs, AreShownWithoutTheKernelsNotices) {
  const testing::TempFolder folder;
  RankOutputs outputs({.tee = true}, "run");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int lowest = ::dup(0);
  ASSERT_GE(lowest, 0);
  ::close(lowest);
  const rlimit none{static_cast<rlim_t>(lowest), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  outputs.begin_attempt(0, folder.path());  // as where the user has no more instances of inotify
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_LT(outputs.descriptor(), 0);
  const auto streams = outputs.open(3, 0);
  ASSERT_TRUE(outputs.look_again_after());
  EXPECT_LE(*outputs.look_again_after(), milliseconds(1000));
  EXPECT_GT(*outputs.look_again_after(), milliseconds(0));
  say(streams.out, "hello\n");
  const Captured shown(folder / "shown");
  outputs.pump();
  EXPECT_EQ(shown.text(), "[rank3]: hello\n");
}

}  // namespace
}  // namespace tessera::comm
