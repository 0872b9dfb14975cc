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
  std::map<std::string, int64_t> no_backward;  // why
  std::map<std::string, int64_t> wrong;        // programs, by what they show
  std::vector<Defect> defects;                 // the first of each, shrunk

  std::string log() const;
};

// Programs of the seeds from `first_seed` on. What a rank refuses is taken out, and the rest run again.
Findings run_programs(const std::vector<int64_t>& mesh, uint64_t first_seed, int64_t count,
                      const std::string& device = "cpu");

// The same as the environment asks: the first seed in TESSERA_SEED (a new one without), their number in
// TESSERA_PROGRAMS (`count` without). Prints the seed and the log.
Findings run_asked_programs(const std::vector<int64_t>& mesh, int64_t count, const std::string& device = "cpu");

// The programs of kept/, each of which once showed a defect; where it is mended by a refusal, the file's first line
// says so.
struct KeptFindings {
  int programs = 0;
  std::vector<std::string> wrong;
};
KeptFindings run_kept_programs(const std::string& device = "cpu");

// {2}, {3}, {4}, {8}, {2, 2}, {2, 3}, {4, 2}, {2, 2, 2}
const std::vector<std::vector<int64_t>>& program_meshes();

// Runs one program as it stands. Its refusals are counted; a wrong verdict is returned.
Verdict run_program(RanksSession& ranks, Program program, Findings& findings);

std::string mesh_name(const std::vector<int64_t>& mesh);  // "2x2"

}  // namespace tessera::testing
