// Two hosts on one machine. Each host is a process with its own network namespace and host name; a pair of virtual
// interfaces joins them. This needs the right to make namespaces, which CI has; otherwise the test is skipped.
//
//   class TwoHosts : public testing::TwoHostsTest {};
//   TEST_F(TwoHosts, Meet) {
//     start([](int number) { return launch(..., number); });    // in the host's process, after go()
//     if (IsSkipped() || HasFatalFailure()) return;
//     for (const auto& host : hosts_) host->go();
//     for (const auto& host : hosts_) EXPECT_EQ(host->wait(), 0) << host->said();
//   }
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/temp_folder.h"

namespace tessera::testing {

// An address of host 0. No other program is in the namespaces.
inline constexpr const char* kFirstHost = "10.77.0.1:29471";

class Host {
 public:
  // `names` is the host's /etc/hosts. `work` runs after go() has been called; its result is the exit code.
  Host(int number, const std::filesystem::path& folder, const std::string& names, const std::function<int()>& work);
  ~Host();  // kills the process
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  int refused() const { return refused_; }  // errno of the namespaces; 0 if they exist
  pid_t process() const { return process_; }
  void go() const;
  int wait();                // the exit code; 128 + n after signal n
  std::string said() const;  // output on stdout and stderr

 private:
  [[noreturn]] void run(int up, int down, const std::string& names, const std::function<int()>& work) const;
  int enter_own_world(const std::string& names) const;  // returns errno

  int number_;
  std::filesystem::path log_, names_;
  pid_t process_ = -1;
  int go_ = -1, refused_ = 0, code_ = -1;
};

class TwoHostsTest : public ::testing::Test {
 protected:
  // Call before start(): on host `number` the name resolves to `address`.
  void resolve(int number, const std::string& name, const std::string& address) {
    names_[number] += address + " " + name + "\n";
  }
  void start(const std::function<int(int number)>& work);
  // Runs a command on a host. The command must succeed.
  void in_host(int number, std::vector<std::string> command) const;

  const TempFolder folder_;
  std::string names_[2] = {"127.0.0.1 localhost\n", "127.0.0.1 localhost\n"};
  std::vector<std::unique_ptr<Host>> hosts_;
};

}  // namespace tessera::testing
