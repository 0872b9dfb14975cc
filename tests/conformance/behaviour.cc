#include "tests/conformance/behaviour.h"

#include "tessera/dtensor/debug/comm_debug.h"
#include "tessera/dtensor/dispatch/plan.h"
#include "tessera/dtensor/random/random.h"
#include "tests/dtensor/support.h"

namespace tessera::testing {

namespace {

constexpr int kRanks = 4;

std::string joined(const Combination& combination) {
  std::string text;
  for (const auto& placement : combination) text += (text.empty() ? "" : " ") + to_string(placement);
  return text;
}

// Returns the placements as upstream writes them, without spaces.
std::string placement_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_dtensor(tensor)) return "-";
  std::string text = to_string(placements(tensor)[0]);
  std::erase(text, ' ');
  return text;
}

int64_t step_bytes(const Placement& from, const Placement& to, int64_t local_bytes) {
  if (from.is_replicate() || to.is_partial()) return 0;
  if (from.is_partial()) return local_bytes * (kRanks - 1) / kRanks * (to.is_shard() ? 1 : 2);
  return to.is_replicate() ? local_bytes * (kRanks - 1) : local_bytes * (kRanks - 1) / kRanks;
}

// Returns the planned behaviour of an operation for which this machine has no kernel.
Behaviour planned(const Sample& sample, const std::vector<Slot>& slots, const std::vector<c10::IValue>& args,
                  const Tensors& placed) {
  const OpInfo entry(sample.op);
  entry.rule = find_rule(entry);
  const auto plan = make_plan(entry, args);
  Behaviour behaviour;
  for (const auto& move : plan->redistributions) {
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i].arg == move.arg && slots[i].element == move.element) {
        const at::Tensor local = to_local(placed[i]);
        if (!move.steps.empty()) {  // one step, because the mesh has one dim
          behaviour.bytes += step_bytes(placements(placed[i])[0], move.to->values[0],
                                        local.numel() * static_cast<int64_t>(local.element_size()));
        }
      }
    }
  }
  for (const auto& output : plan->outputs) {
    for (const auto& tensor : output.tensors) behaviour.outputs.push_back(to_string(tensor.placements->values[0]));
  }
  return behaviour;
}

Observed observe(const SharedSample& shared, const Combination& combination, const MeshPtr& mesh) {
  const Reference& reference = *shared.reference;
  Observed seen{.op = shared.name(), .inputs = joined(combination), .behaviour = {}, .error = {}};
  try {
    Tensors placed;
    for (size_t i = 0; i < shared.slots.size(); ++i) {
      placed.push_back(place(shared.slots[i].plain, mesh, {combination[i]}));
    }
    auto args = with_tensors(reference.sample, shared.slots, placed);
    if (reference.sample.plan_only) {
      seen.behaviour = planned(reference.sample, shared.slots, args, placed);
      return seen;
    }
    if (reference.functional) {
      const auto outs = outs_like(reference, shared.slots, placed);
      size_t next = 0;
      for (size_t i = 0; i < args.size(); ++i) {
        if (reference.sample.op.schema().arguments()[i].is_out()) args[i] = outs.at(next++);
      }
    }
    CommDebugMode count;
    const Outcome outcome = call(reference.sample, {}, args);
    seen.behaviour.bytes = count.total_bytes();
    for (const auto& tensor : outcome.tensors) seen.behaviour.outputs.push_back(placement_of(tensor));
  } catch (const std::exception& error) {
    seen.behaviour.error = true;
    seen.error = error.what();
    seen.may_refuse = reference.may_refuse(seen.error);
  }
  return seen;
}

}  // namespace

std::vector<Observed> behaviours_of(const std::vector<SharedSample>& samples) {
  std::vector<Observed> all;
  on_ranks(kRanks, {kRanks}, [&](const MeshPtr& mesh) {
    const at::NoGradGuard no_grad;
    manual_seed(kDrawSeed, mesh);  // else the first draw agrees on a seed, whose bytes count
    for (const auto& sample : samples) {
      for (const auto& combination : sample.placements) {
        Observed seen = observe(sample, combination, mesh);
        if ((*mesh->coordinate())[0] == 0) all.push_back(std::move(seen));
      }
    }
  });
  return all;
}

}  // namespace tessera::testing
