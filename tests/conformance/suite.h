// Shared code of the conformance tests: the operations of a group as cases, and the checks of a report.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/conformance/runner.h"

namespace tessera::testing {

// The groups of ops.txt.
inline constexpr const char* kOpGroups[] = {"pointwise",     "pointwise_inplace",
                                            "pointwise_out", "foreach",
                                            "fused",         "view",
                                            "tensor",        "reduction",
                                            "matmul",        "loss",
                                            "norm_layer",    "attention",
                                            "linalg",        "fft",
                                            "pooling",       "upsample",
                                            "convolution",   "random"};

// The groups of elementwise operations, which are most operations and share few rules.
inline constexpr const char* kElementwiseGroups[] = {"pointwise", "pointwise_inplace", "pointwise_out", "foreach"};

// Returns the numbers of rows to try on k ranks: uneven numbers, and fewer rows than ranks.
std::vector<int64_t> row_counts(int64_t k);
// The operations of missing_ops.txt. Only the slow tests run them, and fail if one works.
const std::vector<std::string>& missing_ops();
// The seed: TESSERA_SEED if it is set, else `otherwise`, else a new one. Prints it.
unsigned random_seed(std::optional<unsigned> otherwise = std::nullopt);

// Calls `add` with a reference for every sample of every operation of the group. An operation without samples fails the
// test. With TESSERA_OP set, only operations whose name contains its value are added. Operations of missing_ops.txt are
// left out, unless TESSERA_OP selects them.
void add_group(const std::string& group, const std::vector<int64_t>& rows,
               const std::function<void(const std::shared_ptr<const Reference>&)>& add, bool missing_too = false);
// Fails the test for each of these operations: one that failed and is not in missing_ops.txt; one of missing_ops.txt
// that was run and did not fail (unless the cases were drawn at random); one that never took a tensor that was not
// replicated; one whose plain backward fails in another way than no_backward.txt says.
void expect_conforming(const Report& report, const std::string& group, bool at_random = false,
                       bool missing_too = false);
// Fails the test unless the numbers of cases, compared gradients and refusals are those of counts.txt for this run. A
// case that is neither compared nor refused by a rule changes these numbers. With TESSERA_OP set the numbers are only
// printed.
void expect_counts(const Report& report, const std::string& run);
// Runs all placements of the group's samples on a mesh of k ranks, and checks the numbers of counts.txt.
void expect_equal_on_mesh(const std::string& group, int64_t k);
void expect_counted(const std::string& run, const std::string& found);

}  // namespace tessera::testing
