// Thread ranks that run one program after another and compare with the results of plain tensors.
//
//   RanksSession ranks({2, 2});
//   const Verdict verdict = ranks.run(trial);
//
// The ranks stay alive between programs. Results and gradients must equal those of plain tensors. Their sizes, strides,
// types and placements must be the same on every rank. Either all ranks raise an error or no rank does. If a rank fails
// alone, the ranks that wait for it are ended and new ranks are started, so that a defect ends no test. One caller at a
// time.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/conformance/programs/evaluate.h"
#include "tests/conformance/programs/refusal.h"

namespace tessera::testing {

// A program and its results on plain tensors.
struct Trial {
  Program program;
  Plain plain;
};

struct Verdict {
  enum class Kind { kFine, kRefused, kWrong };
  Kind kind = Kind::kFine;
  Refusal refusal = Refusal::kNone;
  int step = -1;        // the step that was refused or raised
  bool parted = false;  // a rank waited in vain; new ranks may not
  std::string label;    // of the defect: equal for programs with the same defect
  std::string what;     // the full text
};

// The label of a defect in which a rank waits for a rank that went on or raised.
inline constexpr const char* kParted = "ranks parted";

class RanksSession {
 public:
  // device: device of the mesh. The reference is computed on the CPU.
  explicit RanksSession(std::vector<int64_t> mesh, std::string device = "cpu");
  ~RanksSession();
  RanksSession(const RanksSession&) = delete;
  RanksSession& operator=(const RanksSession&) = delete;

  // Sets how long a rank waits for a rank that does not come.
  void set_patience(std::chrono::milliseconds patience);
  Verdict run(std::shared_ptr<const Trial> trial);
  const std::vector<int64_t>& mesh() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::testing
