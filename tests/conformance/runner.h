// Runs samples on DTensors over thread ranks and compares with the plain operation.
//
//   Conformance run({.mesh = {4}});
//   for (const auto& sample : samples) run.add(make_reference(sample));
//   run.check();                       // one session of ranks for all cases
//   run.report().failures              // operation -> what went wrong
//
// A case is one sample with placements for its tensors. What must hold: the results, and the gradients, equal the plain
// ones, whatever gradient flows in: one that lies as the result does, a replicated and a partial one. An operation that
// writes to an argument may refuse with one of the errors for what would be lost, a view with those of the view rules:
// their whole texts are in refusal_text.h.
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
  std::vector<Placements> placements;  // one a slot; of out= arguments as the result has them
  std::string describe() const;
};

struct Report {
  int64_t cases = 0;
  int64_t refused = 0;    // with an error that the operation may give
  int64_t gradients = 0;  // cases whose gradients were compared
  int64_t rare = 0;       // cases with a strided shard or an uncommon Partial
  // What plain backwards say instead of giving gradients, by operation.
  std::map<std::string, std::set<std::string>> no_backward;
  std::set<std::string> placements;
  std::map<std::string, std::vector<std::string>> failures;  // by operation
  std::map<std::string, int64_t> failed_cases;
  std::map<std::string, int64_t> worked;  // cases with a tensor not replicated that gave a result
};

struct ConformanceOptions {
  std::vector<int64_t> mesh;
  bool full = false;           // also through full_tensor, where comparing the parts would do
  std::string device = "cpu";  // of the mesh; what is wanted is computed on the CPU
  // Processes are this program again, with the filter of the current test: draws must be of a fixed seed.
  RankMode mode = RankMode::kThreads;
  // Draws whose operation has one of these in its name may be the float32 beside instead of the same bits.
  std::vector<std::string> unit_apart = {};
};

class Conformance {
 public:
  explicit Conformance(ConformanceOptions options) : options_(std::move(options)) {}
  void add(std::shared_ptr<const Reference> reference, std::vector<Placements> placements);
  // Every combination on a mesh of one dim; with_rare: those of rare_combinations() too.
  void add_all(const std::shared_ptr<const Reference>& reference, bool with_rare = false);
  // This many, drawn at random.
  void add_random(const std::shared_ptr<const Reference>& reference, int count, rc::Random& random);
  // Runs the cases. With process ranks the report is that of each of them; the process that started them has none, and
  // is told so by false.
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
