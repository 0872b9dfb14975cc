#include "tests/conformance/runner.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <optional>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/dtensor/dispatch/plan.h"
#include "tessera/dtensor/random/random.h"
#include "tests/conformance/meeting.h"
#include "tests/conformance/shares.h"
#include "tests/dtensor/support.h"

namespace tessera::testing {

std::string Case::describe() const { return reference->sample.label + " (" + testing::describe(placements) + ")"; }

namespace {

// Sends the result of a step on this rank, and returns the results of all ranks.
using Tell = std::function<std::vector<std::string>(const std::string&)>;

// The placements of the gradient of the results.
enum class Flow { kAsTheResult, kReplicated, kPartial };

class Checker {
 public:
  Checker(const ConformanceOptions& options, const MeshPtr& mesh, Tell tell)
      : options_(options), mesh_(mesh), tell_(std::move(tell)) {}

  // Returns the errors of all ranks as text; empty if there are none.
  std::string check(const Case& one, Flow flow) {
    case_ = &one;
    reference_ = one.reference.get();
    refused = differentiated = false;
    wrong_.clear();
    outcome_ = {};
    leaves_.clear();
    if (step([&] { forward(); }) && step([&] { compare_outcome(); }) && gradients_wanted() &&
        step([&] { backward(flow); })) {
      differentiated = true;
      step([&] { compare_gradients(); });
    }
    return wrong_;
  }

  bool refused = false;
  bool differentiated = false;

 private:
  // Runs `body` on all ranks. Returns false if it failed on one of them.
  template <class Body>
  bool step(Body body) {
    std::string error;
    try {
      body();
    } catch (const std::exception& caught) {
      error = caught.what();
      error = error.empty() ? "an exception without text" : error;
    }
    const auto errors = tell_(error);
    const auto first = std::ranges::find_if(errors, [](const std::string& e) { return !e.empty(); });
    if (first == errors.end()) return true;
    const bool all = std::ranges::none_of(errors, [](const std::string& e) { return e.empty(); });
    refused = all && reference_->may_refuse(*first);
    if (!refused) wrong_ = (all ? "" : fmt::format("on rank {}: ", first - errors.begin())) + *first;
    return false;
  }

  bool gradients_wanted() const {
    if (!reference_->differentiable()) return false;
    for (size_t i = 0; i < reference_->slots.size(); ++i) {
      const auto& placements = case_->placements[i];
      if (reference_->slots[i].mutated && std::ranges::any_of(placements, [](auto& p) { return p.is_partial(); })) {
        return false;  // a copy of it is reduced
      }
    }
    return true;
  }

  void forward() {
    const Sample& sample = reference_->sample;
    for (size_t i = 0; i < reference_->slots.size(); ++i) {
      const auto& slot = reference_->slots[i];
      at::Tensor leaf = place(slot.plain, mesh_, case_->placements[i]);
      leaf.set_requires_grad(reference_->differentiable() && reference_->is_leaf(slot));
      leaves_.push_back(leaf);
    }
    if (sample.plan_only) {
      const OpInfo entry(sample.op);
      entry.rule = find_rule(entry);
      make_plan(entry, with_tensors(sample, reference_->slots, leaves_));
      return;
    }
    if (reference_->functional) {
      forward_out();
      return;
    }
    const Tensors tensors = gradients_wanted() ? writable(reference_->slots, leaves_) : leaves_;
    const at::AutoGradMode mode(gradients_wanted());
    manual_seed(kDrawSeed, mesh_);
    outcome_ = call(sample, reference_->slots, with_tensors(sample, reference_->slots, tensors));
  }

  // The out= arguments have the placements of the result of the form without out=.
  void forward_out() {
    const at::NoGradGuard no_grad;
    const Sample& sample = reference_->sample;
    const auto& arguments = sample.op.schema().arguments();
    auto args = with_tensors(sample, reference_->slots, leaves_);
    const auto outs = outs_like(*reference_, reference_->slots, leaves_);
    size_t next = 0;
    for (size_t i = 0; i < args.size(); ++i) {
      if (arguments[i].is_out()) args[i] = outs.at(next++);
    }
    manual_seed(kDrawSeed, mesh_);
    outcome_ = call(sample, reference_->slots, args);
  }

  void compare_outcome() {
    const Outcome& wanted = reference_->outcome;
    if (outcome_.tensors.size() != wanted.tensors.size()) {
      throw std::runtime_error(fmt::format("{} tensors, wanted {}", outcome_.tensors.size(), wanted.tensors.size()));
    }
    if (reference_->sample.canonical) {
      compare_canonical();
      return;
    }
    for (size_t i = 0; i < wanted.tensors.size(); ++i) {
      compare(outcome_.tensors[i], wanted.tensors[i], fmt::format("result {}", i), shapes_only());
    }
    for (size_t i = 0; i < wanted.others.size(); ++i) {
      const auto& found = outcome_.others.at(i);
      const bool same = wanted.others[i].isDouble() ? std::abs(found.toDouble() - wanted.others[i].toDouble()) < 1e-9
                                                    : found == wanted.others[i];
      if (!shapes_only() && !same) throw std::runtime_error("another value than the plain operation gives");
    }
  }

  bool shapes_only() const { return reference_->sample.undefined_values; }

  // Random numbers must be equal to the bit, unless sums of Partial operands were rounded.
  bool bitwise() const {
    const auto partial = [](const Placements& placements) {
      return std::ranges::any_of(placements, [](const Placement& p) { return p.is_partial(); });
    };
    return reference_->sample.random && std::ranges::none_of(case_->placements, partial);
  }

  void compare_canonical() {
    const at::NoGradGuard no_grad;
    Tensors whole;
    for (const auto& tensor : outcome_.tensors) {
      whole.push_back(tensor.defined() ? full_tensor(tensor.detach()) : tensor);
    }
    const auto& sample = reference_->sample;
    const Tensors found = sample.canonical(sample.args, whole);
    const Tensors wanted = sample.canonical(sample.args, reference_->outcome.tensors);
    for (size_t i = 0; i < wanted.size(); ++i) {
      require_close(found.at(i), wanted[i], fmt::format("canonical result {}", i));
    }
  }

  // may_be_plain: the autograd engine and its formulas give plain zeros for results without an incoming gradient.
  void compare(const at::Tensor& found, const at::Tensor& wanted, const std::string& what, bool shape_only,
               bool may_be_plain = false) {
    const at::NoGradGuard no_grad;
    const auto require = [&](bool holds, const std::string& difference) {
      if (!holds) throw std::runtime_error(what + " " + difference);
    };
    require(found.defined() == wanted.defined(), found.defined() ? "is defined" : "is undefined");
    if (!found.defined()) return;
    if (may_be_plain && !is_dtensor(found)) {
      require(!at::any(found).item<bool>() && found.sizes() == wanted.sizes(), "is a plain tensor, and not of zeros");
      require_close(found, wanted, what);
      return;
    }
    require(is_dtensor(found), "is a plain tensor");
    require(found.sizes() == wanted.sizes(), fmt::format("has shape [{}], wanted [{}]", fmt::join(found.sizes(), ", "),
                                                         fmt::join(wanted.sizes(), ", ")));
    require(found.scalar_type() == wanted.scalar_type(),
            fmt::format("has type {}, wanted {}", toString(found.scalar_type()), toString(wanted.scalar_type())));
    const auto& placements = tessera::placements(found);
    const std::string where = what + " as " + to_string(placements);
    const bool partial = std::ranges::any_of(placements, [](const Placement& p) { return p.is_partial(); });
    if (!partial) {
      const at::Tensor part = to_local(distribute_tensor(wanted.detach(), mesh_, placements, std::nullopt));
      const at::Tensor local = to_local(found.detach());
      require(local.sizes() == part.sizes(),
              fmt::format("as {}: the part has shape [{}], wanted [{}]", to_string(placements),
                          fmt::join(local.sizes(), ", "), fmt::join(part.sizes(), ", ")));
      if (!shape_only) require_close(local, part, where);
    }
    if (!shape_only && (partial || options_.full)) {
      require_close(full_tensor(found.detach()), wanted, where + ", whole");
    }
  }

  void require_close(const at::Tensor& found, const at::Tensor& wanted, const std::string& what) const {
    const auto is_named = [&](const std::string& law) {
      return reference_->sample.label.find(law) != std::string::npos;
    };
    const bool same_bits = bitwise() && std::ranges::none_of(options_.unit_apart, is_named);
    const double tolerance = bitwise() ? 0x1p-23 : reference_->sample.tolerance;
    const at::Tensor a = found.resolve_conj().resolve_neg().cpu();
    const at::Tensor b = wanted.detach().resolve_conj().resolve_neg().cpu();
    if (same_bits ? at::equal(a, b)
                  : a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
                        at::allclose(a, b, tolerance, tolerance, /*equal_nan=*/true)) {
      return;
    }
    std::ostringstream text;
    text << what << ": found " << a << "\nwanted " << b;
    throw std::runtime_error(text.str());
  }

  void backward(Flow flow) {
    Tensors flows;
    for (size_t i = 0; i < reference_->flows.size(); ++i) {
      if (!reference_->flows[i].defined() || !outcome_.tensors[i].defined()) {
        flows.emplace_back();
        continue;
      }
      Placements how = tessera::placements(outcome_.tensors[i]);
      for (auto& placement : how) {
        if (flow == Flow::kPartial && !is_narrow(reference_->flows[i].scalar_type())) {
          placement = Partial();
        } else if (flow == Flow::kReplicated || placement.is_partial()) {
          placement = Replicate();
        }
      }
      flows.push_back(place(reference_->flows[i], mesh_, how));
    }
    gradients_ = gradients_of(outcome_, leaves_, flows);
  }

  void compare_gradients() {
    for (size_t i = 0; i < reference_->gradients.size(); ++i) {
      const at::Tensor found = i < gradients_.size() ? gradients_[i] : at::Tensor();
      compare(found, reference_->gradients[i], fmt::format("gradient {}", i), /*shape_only=*/false,
              /*may_be_plain=*/true);
    }
  }

  const ConformanceOptions& options_;
  const MeshPtr& mesh_;
  Tell tell_;
  const Case* case_ = nullptr;
  const Reference* reference_ = nullptr;
  Outcome outcome_;
  Tensors leaves_;
  Tensors gradients_;
  std::string wrong_;
};

}  // namespace

void Conformance::add(std::shared_ptr<const Reference> reference, std::vector<Placements> placements) {
  if (!reference->no_backward.empty()) {
    report_.no_backward[toString(reference->sample.op.operator_name())].insert(reference->no_backward);
  }
  cases_.push_back({std::move(reference), std::move(placements)});
}

namespace {
// Returns the slots without out= arguments, which have the placements of the result.
std::vector<Slot> free_slots(const Reference& reference) {
  std::vector<Slot> slots;
  for (const auto& slot : reference.slots) {
    const bool out = reference.is_out && reference.sample.op.schema().arguments()[slot.arg].is_out();
    slots.push_back(slot);
    slots.back().whole = slot.whole || out;
  }
  return slots;
}
}  // namespace

void Conformance::add_all(const std::shared_ptr<const Reference>& reference, bool with_rare) {
  const auto slots = free_slots(*reference);
  auto all = combinations(slots);
  if (with_rare) {
    const auto rare = rare_combinations(slots, options_.mesh.at(0));
    report_.rare += static_cast<int64_t>(rare.size());
    all.insert(all.end(), rare.begin(), rare.end());
  }
  for (const auto& combination : all) {
    std::vector<Placements> placements;
    for (const auto& one : combination) placements.push_back({one});
    add(reference, std::move(placements));
  }
}

void Conformance::add_random(const std::shared_ptr<const Reference>& reference, int count, rc::Random& random) {
  const auto slots = free_slots(*reference);
  for (int i = 0; i < count; ++i) {
    add(reference, random_placements(slots, static_cast<int64_t>(options_.mesh.size()), random));
  }
}

void Conformance::note_failure(const Case& one, const std::string& wrong) {
  const std::string name = toString(one.reference->sample.op.operator_name());
  ++report_.failed_cases[name];
  if (report_.failures[name].size() < 3) {
    report_.failures[name].push_back(one.describe() + ": " + wrong.substr(0, 1500));
  }
}

void Conformance::note(const Case& one, bool refused, bool differentiated, const std::string& wrong) {
  ++report_.cases;
  report_.refused += refused;
  report_.gradients += differentiated;
  report_.placements.insert(describe(one.placements));
  const bool spread = std::ranges::any_of(one.placements, [](const Placements& placements) {
    return std::ranges::any_of(placements, [](const Placement& p) { return !p.is_replicate(); });
  });
  report_.worked[toString(one.reference->sample.op.operator_name())] += spread && wrong.empty() && !refused;
  if (!wrong.empty()) note_failure(one, wrong);
}

bool Conformance::check() {
  const int size = static_cast<int>(c10::multiply_integers(options_.mesh));
  if (options_.mode == RankMode::kThreads) {
    check_with_threads(size);
    return true;
  }
  bool is_rank = false;
  run_ranks({.size = size, .mode = options_.mode, .limit_seconds = 600},
            [&](const std::shared_ptr<comm::World>& world) {
              is_rank = true;
              const MeshPtr mesh = init_device_mesh(world, options_.device, options_.mesh);
              std::vector<int> ranks(static_cast<size_t>(size));
              std::iota(ranks.begin(), ranks.end(), 0);
              const auto meeting = world->new_group(ranks, "meeting");
              Checker checker(options_, mesh,
                              [&](const std::string& word) { return comm::all_gather_bytes(*meeting, word); });
              for (size_t i = 0; i < cases_.size(); ++i) {
                const std::string wrong = checker.check(cases_[i], static_cast<Flow>(i % 3));
                note(cases_[i], checker.refused, checker.differentiated, wrong);
              }
            });
  return is_rank;
}

void Conformance::check_with_threads(int size) {
  std::atomic<size_t> position{0};
  while (position < cases_.size()) {
    const size_t first = position;
    Meeting<std::string> meeting(size);
    try {
      comm::run_thread_ranks(size, [&](const std::shared_ptr<comm::World>& world) {
        const MeshPtr mesh = init_device_mesh(world, options_.device, options_.mesh);
        int rank = 0;
        for (int64_t m = 0; m < mesh->ndim(); ++m) {
          rank = rank * static_cast<int>(mesh->shape()[m]) + static_cast<int>((*mesh->coordinate())[m]);
        }
        Checker checker(options_, mesh, [&](const std::string& word) { return meeting.tell(rank, word); });
        for (size_t i = first; i < cases_.size(); ++i) {
          const std::string wrong = checker.check(cases_[i], static_cast<Flow>(i % 3));
          if (rank == 0) {
            note(cases_[i], checker.refused, checker.differentiated, wrong);
            position = i + 1;
          }
        }
      });
    } catch (const std::exception& error) {  // the ranks are in different steps: continue with new ranks
      if (position < cases_.size()) note_failure(cases_[position], error.what());
      ++position;
    }
  }
}

}  // namespace tessera::testing
