// The page of a run that is still training, for a browser and for a plain HTTP client.
#include "tessera/report/live_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "tessera/base/error.h"
#include "tests/support/http_client.h"
#include "tests/support/process.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace tessera::report {
namespace {

using ::testing::AllOf;
using testing::ask;
using testing::free_port;
using testing::get;
using ::testing::HasSubstr;
using testing::loopback;
using ::testing::StartsWith;

class LivePageTest : public ::testing::Test {
 protected:
  void add_step(int step) {
    std::filesystem::create_directories(folder_ / "run");
    std::ofstream(folder_ / "run" / "metrics.jsonl", std::ios::app)
        << fmt::format("{{\"step\":{},\"loss\":{}}}\n", step, 4.0 / step);
  }
  // Waits until the data contain `text` and returns them. The page limits how often it reads the files again.
  static std::string told_soon(uint16_t port, const std::string& text) {
    std::string answer;
    for (int i = 0; i < 500; ++i) {
      answer = get(port, "/data.json");
      if (answer.find(text) != answer.npos) return answer;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return "never told " + text + ": " + answer;
  }
  const testing::TempFolder folder_;
};

TEST_F(LivePageTest, ServesTheRunFromBeforeItsFirstStepUntilItIsDestroyed) {
  const auto port = static_cast<uint16_t>(free_port());
  {
    const LivePage page(port, folder_ / "run");
    EXPECT_THAT(get(port, "/"), AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("text/html"), HasSubstr("uPlot"),
                                      HasSubstr("\"state\":\"starting\"")));
    add_step(1);
    EXPECT_THAT(told_soon(port, "\"step\":[1]"), AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("application/json")));
    add_step(2);
    EXPECT_THAT(told_soon(port, "\"step\":[1,2]"), HasSubstr("\"rows\":2"));
    EXPECT_THAT(get(port, "/data.json", "localhost:8080"), StartsWith("HTTP/1.1 200"));
  }
  EXPECT_EQ(get(port, "/"), "refused");
}

TEST_F(LivePageTest, ShowsErrorsOfARunAndContinuesWhenFixed) {
  add_step(1);
  const auto port = static_cast<uint16_t>(free_port());
  const LivePage page(port, folder_ / "run");
  told_soon(port, "\"step\":[1]");
  std::ofstream(folder_ / "run" / "recipe.yaml") << "train: [";
  EXPECT_THAT(told_soon(port, "cannot be read"), AllOf(HasSubstr("recipe.yaml"), HasSubstr("\"step\":[1]")));
  std::ofstream(folder_ / "run" / "recipe.yaml") << "train: {steps: 3}\n";
  add_step(2);
  EXPECT_THAT(told_soon(port, "\"step\":[1,2]"), ::testing::Not(HasSubstr("cannot be read")));
}

TEST_F(LivePageTest, ServesOnlyItsOwnPathsAndClients) {
  const auto port = static_cast<uint16_t>(free_port());
  const LivePage page(port, folder_ / "run");
  EXPECT_THAT(get(port, "/metrics.jsonl"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(get(port, "/../../etc/passwd"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(get(port, "/", "evil.example"), StartsWith("HTTP/1.1 403"));
  EXPECT_THAT(ask(port, "DELETE / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 405"), HasSubstr("Allow: GET, HEAD")));
  EXPECT_THAT(get(port, "/" + std::string(100'000, 'a')), StartsWith("HTTP/1.1 4"));
  EXPECT_THAT(get(port, "/data.json"), StartsWith("HTTP/1.1 200"));
  // The page listens at no other address of this host.
  const UniqueFd elsewhere(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  auto address = loopback(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
  EXPECT_NE(::connect(elsewhere.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
}

TEST_F(LivePageTest, PortInUseIsAnError) {
  const testing::TakenPort taken;
  const auto port = static_cast<uint16_t>(taken.number());
  try {
    const LivePage page(port, folder_ / "run");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_THAT(error.what(), AllOf(HasSubstr(fmt::format("port {}", port)), HasSubstr("in use")));
  }
}

TEST_F(LivePageTest, UpdatesInABrowserWithoutReloading) {
  if (testing::run_process({"sh", "-c", "command -v chromium"}).exit_code != 0) {
    GTEST_SKIP() << "no chromium in PATH";
  }
  if (testing::kSanitized) {
    GTEST_SKIP() << "the page is made anew less often than the browser's clock, which leaps, asks";
  }
  const auto port = static_cast<uint16_t>(free_port());
  for (int step = 1; step <= 5; ++step) add_step(step);
  const LivePage page(port, folder_ / "run");
  std::atomic<bool> over{false};
  std::thread trainer([&] {
    for (int step = 6; !over; ++step) {
      add_step(step);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  const auto seen = testing::run_process(
      {"chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=9000",
       "--user-data-dir=" + (folder_ / "profile").string(), "--dump-dom", fmt::format("http://127.0.0.1:{}/", port)});
  over = true;
  trainer.join();
  ASSERT_EQ(seen.exit_code, 0) << seen.err;
  const auto number_behind = [&](const std::string& mark) {
    const size_t at = seen.out.find(mark);
    return at == seen.out.npos ? -1 : std::atoi(seen.out.c_str() + at + mark.size());
  };
  const int loaded = number_behind("\"rows\":"), drawn = number_behind("data-chart=\"loss\" data-points=\"");
  EXPECT_GE(loaded, 5) << seen.out.substr(0, 2000);
  EXPECT_GT(drawn, loaded) << "points of the chart, and steps that the page was loaded with";
  EXPECT_THAT(seen.out, HasSubstr(fmt::format("{} steps, ", drawn)));
}

}  // namespace
}  // namespace tessera::report
