// Thread ranks that run one program after another against what plain tensors gave.
//
//   RanksSession ranks({2, 2});
//   const Verdict verdict = ranks.run(trial);
//
// The ranks stay alive between programs. What must hold: results and gradients equal those of plain tensors, their
// sizes, strides, types and placements are the same on every rank, and all ranks raise an error or none does. Ranks
// that wait for one that failed are ended and new ones started, so a defect ends no test. One caller at a time.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/conformance/programs/evaluate.h"
#include "tests/conformance/programs/refusal.h"

namespace tessera::testing {

// A program and what plain tensors give.
struct Trial {
  Program program;
  Plain plain;
};

struct Verdict {
  enum class Kind { kFine, kRefused, kWrong };
  Kind kind = Kind::kFine;
  Refusal refusal = Refusal::kNone;
  int step = -1;        // refused, or raised
  bool parted = false;  // a rank waited for another in vain, which new ranks may not do
  std::string label;    // of the defect: what two programs that show the same one have in common
  std::string what;     // in full
};

// The label where a rank waits for another that went on or raised.
inline constexpr const char* kParted = "ranks parted";

class RanksSession {
 public:
  // device: of the mesh; what is wanted is computed on the CPU.
  explicit RanksSession(std::vector<int64_t> mesh, std::string device = "cpu");
  ~RanksSession();
  RanksSession(const RanksSession&) = delete;
  RanksSession& operator=(const RanksSession&) = delete;

  // How long a rank waits for one that does not come.
  void set_patience(std::chrono::milliseconds patience);
  Verdict run(std::shared_ptr<const Trial> trial);
  const std::vector<int64_t>& mesh() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::testing
