// Slow test: every public header compiles alone, in a project outside the tree that links the header's component.
#include <gtest/gtest.h>

#include "tests/examples/installed.h"

namespace tessera::testing {
namespace {

TEST(PublicHeaders, CompileAlone) {
  const Installed installed({});
  std::string components;
  for (const auto& name : public_headers()) components += (components.empty() ? "" : ";") + name;
  const auto run = installed.build_outside(components, "outside");
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
}

}  // namespace
}  // namespace tessera::testing
