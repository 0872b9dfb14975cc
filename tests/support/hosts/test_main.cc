// main() of every test program: runs the tests that its arguments choose, in this process or in forks of it
// (test_host.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/hosts/test_host.h"

int main(int argc, char** argv) {
  std::vector<std::string> words(argv, argv + argc);
  if (auto asked = tessera::testing::serve_tests()) words = *asked;
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  int count = static_cast<int>(words.size());
  ::testing::InitGoogleMock(&count, pointers.data());
  return RUN_ALL_TESTS();
}
