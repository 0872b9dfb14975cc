#include "tests/conformance/suite.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <random>

#include "tests/conformance/refusal_text.h"
#include "tests/support/process.h"

namespace tessera::testing {

std::vector<int64_t> row_counts(int64_t k) {
  std::vector<int64_t> rows{2 * k + 1, k + 1, 1, 0};
  if (k - 1 > 1) rows.push_back(k - 1);
  return rows;
}

namespace {

// Returns for each line of a file in tests/conformance its first words and the rest of the line.
std::vector<std::pair<std::string, std::string>> lines_of(const char* name) {
  std::vector<std::pair<std::string, std::string>> lines;
  std::ifstream file(source_folder() / "tests/conformance" / name);
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && !line.starts_with('#')) {
      const size_t end = std::min(line.find(' '), line.size());
      lines.emplace_back(line.substr(0, end), line.substr(std::min(end + 1, line.size())));
    }
  }
  return lines;
}

bool asked_for_few() { return std::getenv("TESSERA_OP") != nullptr; }

}  // namespace

const std::vector<std::string>& missing_ops() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> read;
    for (const auto& [name, reason] : lines_of("missing_ops.txt")) read.push_back(name);
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

bool is_missing(const ListedOp& op) { return std::count(missing_ops().begin(), missing_ops().end(), op.name) > 0; }

}  // namespace

void add_group(const std::string& group, const std::vector<int64_t>& rows,
               const std::function<void(const std::shared_ptr<const Reference>&)>& add, bool missing_too) {
  for (const auto& op : listed_ops()) {
    if (!chosen(op, group) || (!missing_too && is_missing(op))) continue;
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

namespace {

// A missing derivative is the usual error and is not listed. Every other error must be in the list.
void expect_backward(const std::string& op, const std::set<std::string>& texts) {
  static const auto listed = lines_of("no_backward.txt");
  for (const auto& text : texts) {
    if (!matches_text(text, "derivative for aten::{} is not implemented") &&
        std::ranges::find(listed, std::pair(op, text)) == listed.end()) {
      ADD_FAILURE() << "the plain backward fails, so that gradients are compared with nothing. Mend the sample, or "
                       "list it in tests/conformance/no_backward.txt:\n"
                    << op << " " << text;
    }
  }
}

}  // namespace

void expect_counts(const Report& report, const std::string& run) {
  size_t no_backward = 0;
  for (const auto& [op, texts] : report.no_backward) no_backward += texts.size();
  expect_counted(run, fmt::format("{} cases, {} of them rare, {} with gradients, {} refused; {} backwards not there",
                                  report.cases, report.rare, report.gradients, report.refused, no_backward));
}

void expect_counted(const std::string& run, const std::string& found) {
  std::cout << run << ": " << found << "\n";
  if (asked_for_few()) return;
  static const auto listed = lines_of("counts.txt");
  const auto line = std::ranges::find_if(listed, [&](const auto& one) { return one.first == run; });
  if (line == listed.end()) {
    std::cout << "  (which counts.txt does not say of it)\n";
    return;
  }
  EXPECT_EQ(line->second, found) << "tests/conformance/counts.txt; if this is right, it is to say:\n"
                                 << run << " " << found;
}

void expect_conforming(const Report& report, const std::string& group, bool at_random, bool missing_too) {
  for (const auto& [op, texts] : report.no_backward) expect_backward(op, texts);
  size_t ops = 0, left_out = 0;
  for (const auto& op : listed_ops()) {
    if (!chosen(op, group)) continue;
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
      "{}: {} operations ({} more are known to be missing), {} different placements, {} cases, of them {} with "
      "gradients, {} refused by rule\n",
      group, ops, left_out, report.placements.size(), report.cases, report.gradients, report.refused);
}

void expect_equal_on_mesh(const std::string& group, int64_t k) {
  Conformance run({.mesh = {k}});
  const auto rows = row_counts(k);
  add_group(group, {rows[0]},
            [&](const std::shared_ptr<const Reference>& reference) { run.add_all(reference, /*with_rare=*/true); });
  add_group(group, {rows.begin() + 1, rows.end()},
            [&](const std::shared_ptr<const Reference>& reference) { run.add_all(reference); });
  run.check();
  expect_conforming(run.report(), group);
  expect_counts(run.report(), fmt::format("{}@{}", group, k));
}

}  // namespace tessera::testing
