// The display of the ranks' output: the amount for each call, and the display without inotify.
#include "tessera/comm/launch/rank_output.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "tests/support/few_descriptors.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

// The text that `passes_on` writes to standard output.
std::string shown_by(const std::function<void()>& passes_on) {
  ::testing::internal::CaptureStdout();
  passes_on();
  return ::testing::internal::GetCapturedStdout();
}

void say(int to, const std::string& text) {
  ASSERT_EQ(::write(to, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

TEST(RankOutputs, LargeOutputIsShownInSeveralCalls) {
  const testing::TempFolder folder;
  RankOutputs outputs({.tee = true}, "run");
  outputs.begin_attempt(0, folder.path());
  const auto streams = outputs.open(0, 0);
  EXPECT_EQ(outputs.poll_interval(), std::nullopt);
  std::string line(100, 'x'), lines;
  line.back() = '\n';
  while (lines.size() < size_t{5} << 20) lines += line;
  say(streams.out, lines + "begun");
  std::string text = shown_by([&] { outputs.show_new_output(); });
  EXPECT_GT(text.size(), size_t{1} << 20);
  EXPECT_LT(text.size(), size_t{2} << 20);
  EXPECT_EQ(outputs.poll_interval(), milliseconds(0));
  text += shown_by([&] {
    for (int i = 0; i < 20 && outputs.poll_interval(); ++i) outputs.show_new_output();
  });
  EXPECT_EQ(outputs.poll_interval(), std::nullopt);
  text += shown_by([&] { outputs.finish(); });
  EXPECT_EQ(static_cast<size_t>(std::ranges::count(text, '\n')), lines.size() / 100 + 1);
  EXPECT_TRUE(text.ends_with("[rank0]: begun\n"));
}

TEST(RankOutputs, OutputIsShownWithoutInotify) {
  const testing::TempFolder folder;
  RankOutputs outputs({.tee = true}, "run");
  {
    const testing::FewDescriptors none;  // as if the user's limit of inotify instances is reached
    outputs.begin_attempt(0, folder.path());
  }
  EXPECT_LT(outputs.descriptor(), 0);
  const auto streams = outputs.open(3, 0);
  ASSERT_TRUE(outputs.poll_interval());
  EXPECT_LE(*outputs.poll_interval(), milliseconds(1000));
  EXPECT_GT(*outputs.poll_interval(), milliseconds(0));
  say(streams.out, "hello\n");
  EXPECT_EQ(shown_by([&] { outputs.show_new_output(); }), "[rank3]: hello\n");
}

}  // namespace
}  // namespace tessera::comm
