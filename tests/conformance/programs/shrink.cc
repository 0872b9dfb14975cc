#include "tests/conformance/programs/shrink.h"

#include <algorithm>
#include <map>
#include <set>

#include "tests/conformance/programs/soundness.h"

namespace tessera::testing {

namespace {

void rename(std::vector<Arg>& args, const std::map<int, int>& names) {
  for (auto& arg : args) {
    if (auto* one = std::get_if<Arg::Ref>(&arg.value)) {
      const auto found = names.find(one->id);
      one->id = found == names.end() ? one->id : found->second;
    } else if (auto* list = std::get_if<Arg::List>(&arg.value)) {
      rename(*list, names);
    }
  }
}

// Returns all shorter programs to try, the largest cuts first.
std::vector<Program> candidates(const Program& program) {
  std::vector<Program> all;
  if (program.twice) {
    all.push_back(program);
    all.back().twice = false;
  }
  if (!program.flows.empty()) {
    all.push_back(program);
    all.back().flows.clear();
    all.back().twice = false;
    for (size_t i = 0; program.flows.size() > 1 && i < program.flows.size(); ++i) {
      all.push_back(program);
      all.back().flows.erase(all.back().flows.begin() + static_cast<int64_t>(i));
    }
  }
  for (size_t i = program.steps.size(); i-- > 0;) {
    for (const bool bypass : {false, true}) {
      if (auto shorter = without(program, i, bypass)) all.push_back(std::move(*shorter));
    }
  }
  return all;
}

// Returns programs of the same length that are simpler.
std::vector<Program> plainer(const Program& program) {
  std::vector<Program> all;
  const auto try_placements = [&](const Placements& now, const std::function<Placements&(Program&)>& place) {
    for (size_t m = 0; m < now.size(); ++m) {
      if (!now[m].is_replicate()) {
        all.push_back(program);
        place(all.back())[m] = Replicate();
      }
      if (now[m].is_strided_shard()) {
        all.push_back(program);
        place(all.back())[m] = Shard(now[m].dim);
      }
      if (now[m].is_partial() && !now[m].is_partial(ReduceOp::kSum)) {
        all.push_back(program);
        place(all.back())[m] = Partial();
      }
    }
  };
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const Step& step = program.steps[i];
    try_placements(step.placements, [i](Program& p) -> Placements& { return p.steps[i].placements; });
    if (step.grad) {
      all.push_back(program);
      all.back().steps[i].grad = false;
    }
    if (step.async) {
      all.push_back(program);
      all.back().steps[i].async = false;
    }
  }
  for (size_t i = 0; i < program.flows.size(); ++i) {
    try_placements(program.flows[i].placements, [i](Program& p) -> Placements& { return p.flows[i].placements; });
  }
  return all;
}

}  // namespace

namespace {

// If a step that changed a shape in place was removed, the placements of a gradient may not fit its tensor.
bool flows_fit(const Program& program, const Results& values) {
  return std::ranges::all_of(program.flows, [&](const auto& flow) {
    const int64_t dims = values.tensors.at(flow.id).dim();
    return std::ranges::none_of(flow.placements, [&](const Placement& p) { return p.is_any_shard() && p.dim >= dims; });
  });
}

}  // namespace

std::shared_ptr<const Trial> make_trial(const Program& program) {
  try {
    auto trial = std::make_shared<Trial>(Trial{program, run_plain(program, Twin::kClean)});
    return flows_fit(program, trial->plain.values) && is_sound(program, trial->plain) ? trial : nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

std::optional<Program> without(const Program& program, size_t step, bool bypass) {
  Program rest = program;
  rest.steps.clear();
  std::set<int> gone;
  std::map<int, int> names;
  const auto inputs = refs_of(program.steps[step].args);
  const auto& results = program.steps[step].results;
  if (bypass && (inputs.empty() || results.empty())) return std::nullopt;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    Step one = program.steps[i];
    if (i == step) {
      for (const int id : one.results) bypass ? names.emplace(id, inputs[0]).second : gone.insert(id).second;
      continue;
    }
    rename(one.args, names);
    const auto needed = refs_of(one.args);
    if (std::ranges::any_of(needed, [&](int id) { return gone.count(id) > 0; })) {
      gone.insert(one.results.begin(), one.results.end());
      continue;
    }
    rest.steps.push_back(std::move(one));
  }
  for (auto& flow : rest.flows) {
    const auto found = names.find(flow.id);
    flow.id = found == names.end() ? flow.id : found->second;
  }
  std::erase_if(rest.flows, [&](const Flow& flow) { return gone.count(flow.id) > 0; });
  rest.twice = rest.twice && !rest.flows.empty();
  return rest;
}

Program shrink(Program program, const std::function<bool(const Program&)>& shows) {
  int tries = 400;
  for (auto* more : {&candidates, &plainer, &candidates}) {
    for (bool changed = true; changed;) {
      changed = false;
      for (auto& candidate : more(program)) {
        if (--tries < 0) return program;
        if (shows(candidate)) {
          program = std::move(candidate);
          changed = true;
          break;
        }
      }
    }
  }
  return program;
}

}  // namespace tessera::testing
