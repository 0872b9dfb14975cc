// Tests the list of operations that upstream can shard (tests/conformance/ops.txt). Each operation has a rule here, has
// a handler, or is a composite that libtorch decomposes before it asks for a rule.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "tessera/dtensor/dispatch/plan.h"
#include "tests/support/process.h"

namespace tessera {
namespace {

std::vector<std::string> listed_operations() {
  std::ifstream file(testing::source_folder() / "tests/conformance/ops.txt");
  std::vector<std::string> names;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && !line.starts_with('#')) names.push_back(line.substr(0, line.find(' ')));
  }
  return names;
}

TEST(OpList, EveryOperationHasARule) {
  ensure_registered();
  const auto names = listed_operations();
  EXPECT_EQ(names.size(), 1130U);
  EXPECT_EQ(std::set(names.begin(), names.end()).size(), names.size());
  size_t rules = 0;
  size_t handlers = 0;
  size_t composites = 0;
  for (const auto& name : names) {
    const auto dot = name.find('.');
    const auto op = c10::Dispatcher::singleton().findSchema(
        {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    ASSERT_TRUE(op.has_value()) << name << ": libtorch has no such operation";
    const OpInfo entry(*op);
    if (find_handler(name) != nullptr) {
      ++handlers;
    } else if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
      ++composites;
    } else if (find_rule(entry) != nullptr) {
      ++rules;
    } else {
      ADD_FAILURE() << name << " has no sharding rule";
    }
  }
  std::cout << names.size() << " operations: " << rules << " with a rule, " << handlers << " with a handler, "
            << composites << " composites\n";
}

}  // namespace
}  // namespace tessera
