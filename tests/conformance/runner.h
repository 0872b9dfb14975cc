// Runs samples on DTensors over thread ranks and compares with the plain operation.
//
//   Conformance run({.mesh = {4}});
//   for (const auto& sample : samples) run.add(make_reference(sample));
//   run.check();                       // one session of ranks for all cases
//   run.report().failures              // operation -> errors
//
// A case is one sample with placements for its tensors. The results and the gradients must equal the plain ones for
// three placements of the incoming gradient: that of the result, replicated, and Partial. An operation that writes to
// an argument may refuse with an error about lost writes, a view with an error of the view rules. The whole texts of
// these errors are in refusal_text.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/conformance/reference.h"
#include "tests/support/ranks.h"

namespace tessera::testing {

struct Case {
  std::shared_ptr<const Reference> reference;
  std::vector<Placements> placements;  // one per slot; out= arguments have the result's
  std::string describe() const;
};

struct Report {
  int64_t cases = 0;
  int64_t refused = 0;    // cases that ended with an allowed error
  int64_t gradients = 0;  // cases whose gradients were compared
  int64_t rare = 0;       // cases with a strided shard or an uncommon Partial
  // Errors of plain backwards that give no gradients, by operation.
  std::map<std::string, std::set<std::string>> no_backward;
  std::set<std::string> placements;
  std::map<std::string, std::vector<std::string>> failures;  // by operation
  std::map<std::string, int64_t> failed_cases;
  std::map<std::string, int64_t> worked;  // cases with a result and a tensor not replicated
};

struct ConformanceOptions {
  std::vector<int64_t> mesh;
  bool full = false;           // compares full_tensor(), not only the local tensors
  std::string device = "cpu";  // of the mesh; the reference runs on the CPU
  // Process ranks run this program again, with the filter of the current test. Their draws must have a fixed seed.
  RankMode mode = RankMode::kThreads;
  // If an operation's name contains one of these texts, its draws may be the neighbouring float32 numbers of the CPU's.
  std::vector<std::string> unit_apart = {};
};

class Conformance {
 public:
  explicit Conformance(ConformanceOptions options) : options_(std::move(options)) {}
  void add(std::shared_ptr<const Reference> reference, std::vector<Placements> placements);
  // Adds every combination on a mesh of one dim; with_rare: also those of rare_combinations().
  void add_all(const std::shared_ptr<const Reference>& reference, bool with_rare = false);
  // Adds this many cases with placements that are drawn at random.
  void add_random(const std::shared_ptr<const Reference>& reference, int count, rc::Random& random);
  // Runs the cases. With process ranks each process has its own report. In the process that started them the report is
  // empty, and false is returned.
  bool check();
  const Report& report() const { return report_; }

 private:
  void check_with_threads(int size);
  void note(const Case& one, bool refused, bool differentiated, const std::string& wrong);
  void note_failure(const Case& one, const std::string& wrong);

  ConformanceOptions options_;
  std::vector<Case> cases_;
  Report report_;
};

}  // namespace tessera::testing
