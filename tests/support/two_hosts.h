// Two hosts on one machine: a process each, in a network namespace and under a host name of its own, joined by a pair
// of virtual interfaces. Needs the right to make namespaces, which CI has; else the test is skipped.
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

// An address of host 0; nobody else is in the namespaces.
inline constexpr const char* kFirstHost = "10.77.0.1:29471";

class Host {
 public:
  // `names` is what the host has for /etc/hosts. `work` runs when go() has been called; its result is the exit code.
  Host(int number, const std::filesystem::path& folder, const std::string& names, const std::function<int()>& work);
  ~Host();  // kills it
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  int refused() const { return refused_; }  // errno of the namespaces
  pid_t process() const { return process_; }
  void go() const;
  int wait();                // the exit code; 128 + n after signal n
  std::string said() const;  // on stdout and stderr

 private:
  [[noreturn]] void run(int up, int down, const std::string& names, const std::function<int()>& work) const;
  int enter_own_world(const std::string& names) const;  // errno

  int number_;
  std::filesystem::path log_, names_;
  pid_t process_ = -1;
  int go_ = -1, refused_ = 0, code_ = -1;
};

class TwoHostsTest : public ::testing::Test {
 protected:
  // Before start(): on that host the name leads to the address.
  void resolve(int number, const std::string& name, const std::string& address) {
    names_[number] += address + " " + name + "\n";
  }
  void start(const std::function<int(int number)>& work);
  // Runs a command on a host; it must succeed.
  void in_host(int number, std::vector<std::string> command) const;

  const TempFolder folder_;
  std::string names_[2] = {"127.0.0.1 localhost\n", "127.0.0.1 localhost\n"};
  std::vector<std::unique_ptr<Host>> hosts_;
};

}  // namespace tessera::testing
