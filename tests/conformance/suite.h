// What the conformance tests share: the operations of a group as cases, and what a report must say.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/conformance/runner.h"

namespace tessera::testing {

// Those of ops.txt.
inline constexpr const char* kOpGroups[] = {"pointwise",     "pointwise_inplace",
                                            "pointwise_out", "foreach",
                                            "fused",         "view",
                                            "tensor",        "reduction",
                                            "matmul",        "loss",
                                            "norm_layer",    "attention",
                                            "linalg",        "fft",
                                            "pooling",       "upsample",
                                            "convolution",   "random"};

// Those that work element by element: most operations, and few rules.
inline constexpr const char* kElementwiseGroups[] = {"pointwise", "pointwise_inplace", "pointwise_out", "foreach"};

// Rows to try on k ranks: uneven, and fewer than ranks.
std::vector<int64_t> row_counts(int64_t k);
// The operations of missing_ops.txt. Only the slow tests run them, and fail if one works.
const std::vector<std::string>& missing_ops();
// The seed: TESSERA_SEED if it is set, else `otherwise`, else a new one. Prints it.
unsigned random_seed(std::optional<unsigned> otherwise = std::nullopt);

// Gives `add` a reference for every sample of every operation of the group. Fails the test for an operation without.
// With TESSERA_OP set, only for operations whose name contains it. Leaves those known to be missing out, unless asked
// for.
void add_group(const std::string& group, const std::vector<int64_t>& rows,
               const std::function<void(const std::shared_ptr<const Reference>&)>& add, bool missing_too = false);
// Fails the test for every operation that went wrong and is not known to be missing, for every one known to be missing
// that was run and did not (unless the cases were drawn at random), for one that never took a tensor that was not
// replicated, and for one whose plain backward fails otherwise than no_backward.txt says.
void expect_conforming(const Report& report, const std::string& group, bool at_random = false,
                       bool missing_too = false);
// Fails the test unless there were as many cases, compared gradients and refusals as counts.txt says of this run. What
// is neither compared nor refused by rule is thereby seen. With TESSERA_OP set it only prints them.
void expect_counts(const Report& report, const std::string& run);
// All placements of the group's samples on a mesh of k ranks, with the counts of counts.txt.
void expect_equal_on_mesh(const std::string& group, int64_t k);
void expect_counted(const std::string& run, const std::string& found);

}  // namespace tessera::testing
