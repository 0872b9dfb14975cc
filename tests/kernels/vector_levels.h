// Tests that run once with each set of vector instructions that this processor has.
//
//   class ElementwiseKernels : public testing::WithVectorLevel {};
//   TEST_P(ElementwiseKernels, ...) { ... }
//   TESSERA_VECTOR_LEVELS(ElementwiseKernels);
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <memory>

#include "tessera/kernels/simd/vector_level.h"

namespace tessera::testing {

class WithVectorLevel : public ::testing::TestWithParam<kernels::VectorLevel> {
 protected:
  void SetUp() override {
    if (GetParam() > kernels::max_vector_level()) {
      GTEST_SKIP() << "this processor has no such vectors";
    }
    level_ = std::make_unique<kernels::VectorLevelGuard>(GetParam());
  }
  void TearDown() override { level_.reset(); }

 private:
  std::unique_ptr<kernels::VectorLevelGuard> level_;
};

inline const char* name_of(kernels::VectorLevel level) {
  constexpr std::array names{"plain", "avx2", "avx512"};
  return names.at(static_cast<size_t>(level));
}

}  // namespace tessera::testing

#define TESSERA_VECTOR_LEVELS(suite)                                                                     \
  INSTANTIATE_TEST_SUITE_P(                                                                              \
      With, suite,                                                                                       \
      ::testing::Values(::tessera::kernels::VectorLevel::kPlain, ::tessera::kernels::VectorLevel::kAvx2, \
                        ::tessera::kernels::VectorLevel::kAvx512),                                       \
      [](const auto& info) { return ::tessera::testing::name_of(info.param); })
