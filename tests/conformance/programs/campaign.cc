#include "tests/conformance/programs/campaign.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <future>
#include <iostream>
#include <random>

#include "tessera/base/files/file.h"
#include "tests/conformance/programs/catalog.h"
#include "tests/conformance/programs/shrink.h"
#include "tests/support/process.h"

namespace tessera::testing {

namespace {

constexpr int kMostShrunk = 40;
constexpr int kMostPartings = 12;  // per shrunk program: each takes a timeout and new ranks

// The rest of a program: its refused steps are removed, until it runs.
struct Rest {
  Verdict verdict;
  std::shared_ptr<const Trial> trial;
};

Rest run_rest(RanksSession& ranks, std::shared_ptr<const Trial> trial, Findings* findings) {
  for (;;) {
    Verdict verdict = ranks.run(trial);
    if (verdict.parted) {  // ranks may be late on a busy machine
      verdict = ranks.run(trial);
    }
    if (verdict.kind != Verdict::Kind::kRefused) return {std::move(verdict), std::move(trial)};
    if (findings != nullptr) ++findings->refusals[to_string(verdict.refusal)];
    const auto rest = without(trial->program, static_cast<size_t>(verdict.step), /*bypass=*/false);
    auto next = rest ? make_trial(*rest) : nullptr;
    if (next == nullptr && rest) {  // without a backward
      Program forward = *rest;
      forward.flows.clear();
      forward.twice = false;
      next = make_trial(forward);
    }
    if (next == nullptr) return {{}, std::move(trial)};
    trial = std::move(next);
  }
}

void count(const Trial& trial, Findings& findings) {
  ++findings.programs;
  findings.backward += !trial.program.flows.empty();
  findings.twice += trial.program.twice;
  findings.narrow += has_narrow(trial.program);
  for (const auto& step : trial.program.steps) {
    if (step.kind != Step::Kind::kInput) {
      ++findings.steps;
      ++findings.operations[step.kind == Step::Kind::kRedistribute ? "redistribute" : step.op];
    }
  }
}

Program shrink_defect(RanksSession& ranks, const Program& program, const Verdict& verdict) {
  ranks.set_patience(std::chrono::milliseconds(4000));
  int partings = 0;
  Program shrunk = shrink(program, [&](const Program& candidate) {
    const auto trial = partings < kMostPartings ? make_trial(candidate) : nullptr;
    if (trial == nullptr) return false;
    const Verdict now = ranks.run(trial);
    partings += now.label == kParted;
    return now.kind == Verdict::Kind::kWrong && now.label == verdict.label;
  });
  ranks.set_patience(std::chrono::milliseconds(15000));
  return shrunk;
}

// Two defects are the same if the shrunk programs that show them have the same label.
void record(RanksSession& ranks, uint64_t seed, const Rest& rest, Findings& findings) {
  std::string label = rest.verdict.label;
  if (findings.shrunk >= kMostShrunk) {
    ++findings.wrong[label];
    return;
  }
  ++findings.shrunk;
  const Program shrunk = shrink_defect(ranks, rest.trial->program, rest.verdict);
  for (const auto& step : shrunk.steps) label += step.kind == Step::Kind::kCall ? " " + step.op : "";
  label += shrunk.flows.empty() ? "" : shrunk.twice ? ", second derivative" : ", backward";
  if (++findings.wrong[label] == 1) {
    const auto again = make_trial(shrunk);
    const Verdict last = again != nullptr ? ranks.run(again) : rest.verdict;
    const bool shows = last.kind == Verdict::Kind::kWrong;
    findings.defects.push_back({seed, label, shows ? last.what : rest.verdict.what, shrunk});
  }
}

}  // namespace

Verdict run_program(RanksSession& ranks, Program program, Findings& findings) {
  const auto trial = std::make_shared<Trial>(Trial{program, run_plain(program, Twin::kClean)});
  count(*trial, findings);
  return run_rest(ranks, trial, &findings).verdict;
}

Findings run_programs(const std::vector<int64_t>& mesh, uint64_t first_seed, int64_t count_wanted,
                      const std::string& device) {
  Findings findings;
  findings.mesh = mesh;
  RanksSession ranks(mesh, device);
  const auto drawn_later = [&](int64_t i) {
    return std::async(std::launch::async, [&mesh, seed = first_seed + static_cast<uint64_t>(i)] {
      at::set_num_threads(1);
      return draw_program(seed, mesh);
    });
  };
  const bool watch = std::getenv("TESSERA_PROGRAMS_WATCH") != nullptr;
  auto next = drawn_later(0);
  for (int64_t i = 0; i < count_wanted; ++i) {
    Drawn drawn = next.get();
    if (i + 1 < count_wanted) next = drawn_later(i + 1);
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    if (watch) std::cerr << "seed " << seed << "\n" << to_text(drawn.program) << std::flush;
    if (!drawn.backward_note.empty()) ++findings.no_backward[drawn.backward_note.substr(0, 60)];
    const auto trial = std::make_shared<const Trial>(Trial{std::move(drawn.program), std::move(drawn.plain)});
    count(*trial, findings);
    const Rest rest = run_rest(ranks, trial, &findings);
    if (rest.verdict.kind != Verdict::Kind::kWrong) continue;
    record(ranks, seed, rest, findings);
  }
  return findings;
}

Findings run_asked_programs(const std::vector<int64_t>& mesh, int64_t count, const std::string& device) {
  const char* seed_asked = std::getenv("TESSERA_SEED");
  const char* count_asked = std::getenv("TESSERA_PROGRAMS");
  const uint64_t seed = seed_asked != nullptr ? std::stoull(seed_asked) : std::random_device{}();
  std::cout << "seed " << seed << " (TESSERA_SEED=" << seed << " draws the same again)\n" << std::flush;
  Findings found = run_programs(mesh, seed, count_asked != nullptr ? std::stoll(count_asked) : count, device);
  std::cout << found.log();
  return found;
}

KeptFindings run_kept_programs(const std::string& device) {
  KeptFindings findings;
  std::map<std::string, std::unique_ptr<RanksSession>> sessions;
  std::set<std::filesystem::path> files;
  for (const auto& file : std::filesystem::directory_iterator(source_folder() / "tests/conformance/programs/kept")) {
    files.insert(file.path());
  }
  for (const auto& file : files) {
    const std::string text = read_file(file);
    const Program program = parse_program(text);
    const auto wanted = text.starts_with("# Refused: ") ? Verdict::Kind::kRefused : Verdict::Kind::kFine;
    auto& ranks = sessions[mesh_name(program.mesh)];
    if (ranks == nullptr) ranks = std::make_unique<RanksSession>(program.mesh, device);
    ++findings.programs;
    const auto trial = make_trial(program);
    if (trial == nullptr) {
      findings.wrong.push_back(file.filename().string() + " is nothing to compare");
      continue;
    }
    const Verdict verdict = ranks->run(trial);
    if (verdict.kind != wanted) {
      findings.wrong.push_back(fmt::format("{}: {}\n{}", file.filename().string(), verdict.label, verdict.what));
    }
  }
  return findings;
}

const std::vector<std::vector<int64_t>>& program_meshes() {
  static const std::vector<std::vector<int64_t>> meshes{{2}, {3}, {4}, {8}, {2, 2}, {2, 3}, {4, 2}, {2, 2, 2}};
  return meshes;
}

std::string mesh_name(const std::vector<int64_t>& mesh) {
  std::string name;
  for (const int64_t size : mesh) name += fmt::format("{}{}", name.empty() ? "" : "x", size);
  return name;
}

std::string Findings::log() const {
  std::string text = fmt::format(
      "mesh {}: {} programs, {} operations, {} different ones, {} with backward, {} with second derivatives, {} with "
      "narrow types\n",
      mesh_name(mesh), programs, steps, operations.size(), backward, twice, narrow);
  const auto list = [&](const char* title, const std::map<std::string, int64_t>& counts) {
    for (const auto& [name, number] : counts) text += fmt::format("  {}: {} ({})\n", title, number, name);
  };
  list("refused", refusals);
  list("nothing flows back", no_backward);
  list("WRONG", wrong);
  for (const auto& defect : defects) {
    text += fmt::format("seed {}: {}\n{}\n---- shrunk:\n{}----\n", defect.seed, defect.label,
                        defect.what.substr(0, 3000), to_text(defect.shrunk));
  }
  return text;
}

}  // namespace tessera::testing
