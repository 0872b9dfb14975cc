#include "tests/conformance/suite.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <random>

#include "tests/support/process.h"

namespace tessera::testing {

std::vector<int64_t> row_counts(int64_t k) {
  std::vector<int64_t> rows{2 * k + 1, k + 1, 1, 0};
  if (k - 1 > 1) {
    rows.push_back(k - 1);
  }
  return rows;
}

const std::vector<std::string>& missing_ops() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> read;
    std::ifstream file(source_folder() / "tests/conformance/missing_ops.txt");
    for (std::string line; std::getline(file, line);) {
      if (!line.empty() && !line.starts_with('#')) {
        read.push_back(line.substr(0, line.find(' ')));
      }
    }
    return read;
  }();
  return names;
}

unsigned random_seed(std::optional<unsigned> otherwise) {
  const char* given = std::getenv("TESSERA_SEED");
  const unsigned drawn = otherwise ? *otherwise : std::random_device{}();
  const unsigned seed = given != nullptr ? static_cast<unsigned>(std::stoul(given)) : drawn;
  std::cout << "seed " << seed << " (TESSERA_SEED=" << seed << " draws the same again)\n";
  return seed;
}

namespace {

bool chosen(const ListedOp& op, const std::string& group) { return op.group == group && is_asked_for(op.name); }

bool is_missing(const ListedOp& op) {
  return std::count(missing_ops().begin(), missing_ops().end(), op.name) > 0;
}

}  // namespace

void add_group(const std::string& group, const std::vector<int64_t>& rows,
               const std::function<void(const std::shared_ptr<const Reference>&)>& add, bool missing_too) {
  for (const auto& op : listed_ops()) {
    if (!chosen(op, group) || (!missing_too && is_missing(op))) {
      continue;
    }
    size_t count = 0;
    for (const int64_t n : rows) {
      std::string label = op.name;
      try {
        for (const auto& sample : sample_table().samples(op.name, n, 6)) {
          label = sample.label;
          add(std::make_shared<const Reference>(make_reference(sample)));
          ++count;
        }
      } catch (const std::exception& error) {
        ADD_FAILURE() << label << ": the plain operation fails: " << error.what();
      }
    }
    EXPECT_GT(count, 0U) << op.name << " has no sample: see tests/conformance/samples.h";
  }
}

void expect_conforming(const Report& report, const std::string& group, bool at_random, bool missing_too) {
  size_t ops = 0, left_out = 0;
  for (const auto& op : listed_ops()) {
    if (!chosen(op, group)) {
      continue;
    }
    if (!missing_too && is_missing(op)) {
      ++left_out;
      continue;
    }
    ++ops;
    const auto failed = report.failures.find(op.name);
    const bool missing = is_missing(op);
    if (failed != report.failures.end() && !missing) {
      ADD_FAILURE() << op.name << ": " << report.failed_cases.at(op.name) << " cases failed, the first:\n  "
                    << fmt::format("{}", fmt::join(failed->second, "\n  "));
    } else if (failed == report.failures.end() && missing && !at_random) {
      ADD_FAILURE() << op.name << " works: take it out of tests/conformance/missing_ops.txt";
    }
    const auto worked = report.worked.find(op.name);
    if (!missing && !at_random && worked != report.worked.end() && worked->second == 0 &&
        failed == report.failures.end()) {
      ADD_FAILURE() << op.name << " refused every placement but Replicate";
    }
  }
  std::cout << fmt::format(
      "{}: {} operations ({} more are known to be missing), {} different placements, {} cases, of them {} with gradients, "
      "{} refused by rule\n", group,
      ops, left_out, report.placements.size(), report.cases, report.gradients, report.refused);
}

}  // namespace tessera::testing
