// Error: kinds, exit codes and messages.
#include "tessera/base/error.h"

#include <gtest/gtest.h>

#include <new>

namespace tessera {
namespace {

TEST(Error, KindsMapToDocumentedExitCodes) {
  EXPECT_EQ(Error(ErrorKind::kConfig, "").exit_code(), 2);
  EXPECT_EQ(Error(ErrorKind::kFormat, "").exit_code(), 3);
  EXPECT_EQ(Error(ErrorKind::kIo, "").exit_code(), 3);
  EXPECT_EQ(Error(ErrorKind::kComm, "").exit_code(), 4);
  EXPECT_EQ(Error(ErrorKind::kMemory, "").exit_code(), 5);
  EXPECT_EQ(Error(ErrorKind::kInternal, "").exit_code(), 1);
}

TEST(Error, OutOfMemoryHasExitCodeFiveForEveryExceptionType) {
  EXPECT_EQ(exit_code_for(std::bad_alloc()), 5);
  EXPECT_EQ(exit_code_for(std::runtime_error("DefaultCPUAllocator: can't allocate memory: you tried")), 5);
  EXPECT_EQ(exit_code_for(std::runtime_error("anything else")), 1);
}

TEST(Error, CheckFormatsItsMessage) {
  try {
    TESSERA_CHECK(1 > 2, ErrorKind::kShape, "found {} against {}", 1, 2);
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "found 1 against 2");
    EXPECT_EQ(error.kind(), ErrorKind::kShape);
  }
}

}  // namespace
}  // namespace tessera
