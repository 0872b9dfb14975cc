// Draws programs one after another, runs them on ranks, and shrinks those that show a defect.
//
//   const Findings found = run_programs({2, 2}, /*first_seed=*/17, /*count=*/400);
//   EXPECT_TRUE(found.defects.empty());
//   std::cout << found.log();
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/conformance/programs/ranks_session.h"

namespace tessera::testing {

struct Defect {
  uint64_t seed = 0;
  std::string label;
  std::string what;
  Program shrunk;
};

struct Findings {
  std::vector<int64_t> mesh;
  int64_t programs = 0;
  int64_t steps = 0;
  int64_t backward = 0;
  int64_t twice = 0;
  int64_t narrow = 0;
  int64_t shrunk = 0;
  std::map<std::string, int64_t> operations;   // how often each was run
  std::map<std::string, int64_t> refusals;     // by kind
  std::map<std::string, int64_t> no_backward;  // programs without backward, by reason
  std::map<std::string, int64_t> wrong;        // programs, by label
  std::vector<Defect> defects;                 // the first of each label, shrunk

  std::string log() const;
};

// Runs the programs of the seeds from `first_seed` on. A step that is refused is removed, and the rest of the program
// runs again.
Findings run_programs(const std::vector<int64_t>& mesh, uint64_t first_seed, int64_t count,
                      const std::string& device = "cpu");

// Runs the programs that the environment asks for: TESSERA_SEED is the first seed (a new one if unset),
// TESSERA_PROGRAMS their number (`count` if unset). Prints the seed and the log.
Findings run_asked_programs(const std::vector<int64_t>& mesh, int64_t count, const std::string& device = "cpu");

// Runs the programs of kept/, each of which once showed a defect. If the defect was fixed by a refusal, the file's
// first line says so.
struct KeptFindings {
  int programs = 0;
  std::vector<std::string> wrong;
};
KeptFindings run_kept_programs(const std::string& device = "cpu");

// {2}, {3}, {4}, {8}, {2, 2}, {2, 3}, {4, 2}, {2, 2, 2}
const std::vector<std::vector<int64_t>>& program_meshes();

// Runs one program without removing steps. Its refusals are counted; a wrong verdict is returned.
Verdict run_program(RanksSession& ranks, Program program, Findings& findings);

std::string mesh_name(const std::vector<int64_t>& mesh);  // "2x2"

}  // namespace tessera::testing
