// Chooses the placements of a call's inputs and outputs. As in PyTorch's single-dim strategies, the candidates are all
// combinations of one strategy for each mesh dim. The combination with the lowest cost of redistributing the inputs is
// chosen.
#include <algorithm>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/dtensor/dispatch/plan.h"

namespace tessera {

namespace {

constexpr size_t kMaxCombinations = 4096;

bool is_sharded(const Strategy& strategy) {
  const auto any = [](const auto& list) {
    return std::ranges::any_of(list, [](const Placement& p) { return p.is_any_shard(); });
  };
  return any(strategy.inputs) || any(strategy.outputs);
}

bool is_whole(const Strategy& strategy) {
  return std::ranges::all_of(strategy.inputs, [](const Placement& p) { return p.is_replicate(); });
}

// Returns the strategy with each Shard replaced by a StridedShard with `split_factor`.
Strategy as_strided_shards(Strategy strategy, int32_t split_factor) {
  for (auto* list : {&strategy.inputs, &strategy.outputs}) {
    for (auto& placement : *list) {
      if (placement.is_shard()) placement = StridedShard(placement.dim, split_factor);
    }
  }
  return strategy;
}

// Searches for the cheapest combination of strategies. `per_dim_[m]` holds the candidate strategies on mesh dim m: the
// rule's strategies that keep the placements of written arguments and of fixed outputs. If the inputs' present
// placements match a candidate on each mesh dim and the rule accepts them, no input is redistributed and the search
// ends. Otherwise the search compares the costs of all combinations. The result depends only on global shapes and
// placements, so all ranks choose the same combination.
class StrategyChooser {
 public:
  StrategyChooser(const OpCall& call, const Proposal& proposal, size_t output_count, const FixedOutputs& fixed)
      : call_(call), proposal_(proposal), output_count_(output_count), fixed_(fixed), ndim_(call.mesh->ndim()) {
    has_written_input_ = std::ranges::any_of(call.inputs, [](const TensorInput& input) { return input.is_written; });
    for (int64_t m = 0; m < ndim_; ++m) per_dim_.push_back(candidates(m));
  }

  PlacementChoice choose() {
    for (int64_t m = 0; m < ndim_; ++m) {
      if (per_dim_[m].empty()) fail_in_place(m);
    }
    Picks picks(ndim_);
    if (find_exact_match(picks)) {
      PlacementChoice choice = combine(picks);
      if (are_partials_compatible(choice) && is_supported(choice)) return choice;
    }
    size_t combinations = 1;
    for (const auto& list : per_dim_) combinations = std::min(combinations * list.size(), kMaxCombinations + 1);
    if (combinations > kMaxCombinations) keep_cheapest_candidates();
    return cheapest();
  }

 private:
  using Picks = c10::SmallVector<size_t, 4>;

  const Placement& present_placement(size_t input, int64_t m) const { return call_.inputs[input].placements[m]; }

  std::vector<Strategy> candidates(int64_t m) const {
    std::vector<Strategy> all;
    Strategy whole;
    whole.inputs.assign(call_.inputs.size(), Replicate());
    whole.outputs.assign(output_count_, Replicate());
    const auto& listed = proposal_.by_mesh_dim.empty() ? proposal_.strategies : proposal_.by_mesh_dim[m];
    if (std::ranges::none_of(listed, is_whole)) all.push_back(std::move(whole));
    bool any_plain = false;
    c10::SmallVector<int32_t, 2> splits;
    for (const auto* list : {&call_.inputs, &call_.outs}) {
      for (const auto& input : *list) {
        for (const auto& placement : input.placements) {
          any_plain = any_plain || placement.is_shard();
          if (placement.is_strided_shard() && std::ranges::find(splits, placement.split_factor) == splits.end()) {
            splits.push_back(placement.split_factor);
          }
        }
      }
    }
    for (const auto& strategy : listed) {
      TESSERA_CHECK(strategy.inputs.size() == call_.inputs.size(), ErrorKind::kInternal,
                    "[dtensor.rule] {}: the rule gives placements for {} inputs, the call has {}. Correct the rule.",
                    call_.name(), strategy.inputs.size(), call_.inputs.size());
      if (!is_sharded(strategy)) {
        all.push_back(strategy);
        continue;
      }
      if (any_plain || proposal_.allows_new_shards) all.push_back(strategy);
      for (const int32_t split : splits) {
        if (proposal_.supports_strided) all.push_back(as_strided_shards(strategy, split));
      }
    }
    for (auto& strategy : all) {
      if (strategy.outputs.size() == 1) strategy.outputs.resize(output_count_, strategy.outputs[0]);
    }
    std::erase_if(all, [&](const Strategy& strategy) { return !allowed(strategy, m); });
    return all;
  }

  bool allowed(const Strategy& strategy, int64_t m) const {
    for (size_t i = 0; i < call_.inputs.size(); ++i) {
      const Placement& required = strategy.inputs[i];
      if (required == present_placement(i, m)) continue;
      // An argument that the operation writes cannot be redistributed. A Replicate tensor cannot become NormPartial:
      // partial norms are never negative, but the tensor may have negative values.
      if (call_.inputs[i].is_written || required.kind == Placement::Kind::kNormPartial) return false;
    }
    if (makes_too_many_shards(m, m + 1, [&](size_t i, int64_t) { return strategy.inputs[i]; })) return false;
    return std::ranges::all_of(fixed_, [&](const auto& output) {
      return output.first >= strategy.outputs.size() || strategy.outputs[output.first] == output.second[m];
    });
  }

  // Whether an input would be redistributed so that some tensor dim has more shards than elements. Input i would get
  // placement(i, m) on each mesh dim m in [first, last). False if the operation writes an argument, or if another input
  // has a dim with too many shards already and keeps its placements.
  template <class PlacementOf>
  bool makes_too_many_shards(int64_t first, int64_t last, PlacementOf placement) const {
    bool moves_to_crowded = false;
    bool keeps_crowded = false;
    for (size_t i = 0; i < call_.inputs.size(); ++i) {
      const auto& sizes = call_.inputs[i].sizes;
      Sizes parts(sizes.size(), 1);
      bool crowded = false;
      bool moved = false;
      for (int64_t m = first; m < last; ++m) {
        const Placement p = placement(i, m);
        if (p.is_any_shard()) {
          parts[p.dim] *= call_.mesh->shape()[m];
          crowded = crowded || parts[p.dim] > std::max<int64_t>(sizes[p.dim], 1);
          moved = moved || p != present_placement(i, m);
        }
      }
      if (crowded) (moved ? moves_to_crowded : keeps_crowded) = true;
    }
    return moves_to_crowded && !keeps_crowded && !has_written_input_;
  }

  [[noreturn]] void fail_in_place(int64_t m) const {
    std::string fixed;
    for (const auto& [index, placements] : fixed_) fixed += (fixed.empty() ? "" : ", ") + to_string(placements);
    raise(ErrorKind::kShape,
          "Sharding dimension mismatch: [dtensor.dispatch] {}: in-place operations that require placement changes are "
          "not supported. The written tensor has placement {}, but no valid strategy preserves it on mesh dim {}. "
          "Use the out-of-place version, or redistribute first.",
          call_.describe(), fixed.empty() ? "as shown" : fixed, m);
  }

  // Finds, for each mesh dim, a strategy whose input placements equal the placements that the inputs of the call have
  // on this mesh dim. If several strategies match, the last one is used, as in PyTorch. Returns false if no strategy
  // matches on some mesh dim.
  bool find_exact_match(Picks& picks) const {
    for (int64_t m = 0; m < ndim_; ++m) {
      const auto& list = per_dim_[m];
      const auto found = std::find_if(list.rbegin(), list.rend(), [&](const Strategy& strategy) {
        return std::ranges::equal(
            strategy.inputs, call_.inputs,
            [m](const Placement& required, const TensorInput& input) { return required == input.placements[m]; });
      });
      if (found == list.rend()) return false;
      picks[m] = static_cast<size_t>(list.rend() - found) - 1;
    }
    return true;
  }

  PlacementChoice combine(const Picks& picks) const {
    PlacementChoice choice;
    choice.inputs.resize(call_.inputs.size());
    choice.outputs.resize(output_count_);
    for (int64_t m = 0; m < ndim_; ++m) {
      const Strategy& strategy = per_dim_[m][picks[m]];
      for (size_t i = 0; i < choice.inputs.size(); ++i) choice.inputs[i].push_back(strategy.inputs[i]);
      for (size_t i = 0; i < output_count_; ++i) choice.outputs[i].push_back(strategy.outputs[i]);
    }
    return choice;
  }

  static bool are_partials_compatible(const PlacementChoice& choice) {
    return std::ranges::all_of(choice.inputs, tessera::are_partials_compatible) &&
           std::ranges::all_of(choice.outputs, tessera::are_partials_compatible);
  }

  bool is_valid(const PlacementChoice& choice) const {
    return are_partials_compatible(choice) &&
           !makes_too_many_shards(0, ndim_, [&](size_t i, int64_t m) { return choice.inputs[i][m]; }) &&
           is_supported(choice);
  }

  // Whether the rule allows the operation to run with the placements `choice`.
  bool is_supported(const PlacementChoice& choice) const {
    return (proposal_.supports_empty_shards || !has_empty_part(choice)) &&
           (!proposal_.is_legal || proposal_.is_legal(call_, choice));
  }

  // Whether some rank's local tensor would be empty although the global input has elements. The check uses the last
  // rank, which has the smallest shard.
  bool has_empty_part(const PlacementChoice& choice) const {
    for (size_t i = 0; i < choice.inputs.size(); ++i) {
      Sizes least(call_.inputs[i].sizes.begin(), call_.inputs[i].sizes.end());
      for (int64_t m = 0; m < ndim_; ++m) {
        const Placement& p = choice.inputs[i][m];
        if (p.is_any_shard()) {
          const int64_t k = call_.mesh->shape()[m];
          least[p.dim] = local_shard_size(least[p.dim], k, k - 1, p.split_factor);
          if (least[p.dim] == 0 && call_.inputs[i].sizes[p.dim] > 0) return true;
        }
      }
    }
    return false;
  }

  double cost(const TensorInput& input, const Placements& to) const {
    const auto item_bytes = static_cast<int64_t>(input.tensor->element_size());
    return redistribute_cost(input.sizes, item_bytes, *call_.mesh, input.placements, to);
  }

  double cost(const PlacementChoice& choice) const {
    double total = 0;
    for (size_t i = 0; i < choice.inputs.size(); ++i) {
      total += cost(call_.inputs[i], choice.inputs[i]);
    }
    return total;
  }

  // Computes the cost of all combinations of strategies and stops at the first with cost 0.
  PlacementChoice cheapest() const {
    PlacementChoice best;
    double least = std::numeric_limits<double>::infinity();
    Picks picks(ndim_, 0);
    for (bool more = true; more; more = next_combination(picks)) {
      PlacementChoice choice = combine(picks);
      if (!is_valid(choice)) continue;
      const double total = cost(choice);
      if (total < least) {
        least = total;
        best = std::move(choice);
        if (total == 0) break;
      }
    }
    TESSERA_CHECK(!best.inputs.empty() || !has_written_input_, ErrorKind::kShape,
                  "Sharding dimension mismatch: [dtensor.dispatch] {}: the other operands cannot be redistributed to "
                  "the placements of the written tensor. Use the out-of-place version, or redistribute first.",
                  call_.describe());
    TESSERA_CHECK(
        !best.inputs.empty(), ErrorKind::kShape,
        "[dtensor.dispatch] {}: found no placements that the operation can work on. Redistribute its inputs to "
        "Replicate first.",
        call_.describe());
    return best;
  }

  // Changes `picks` to the next combination; the pick of the last mesh dim varies fastest. Returns false after the last
  // combination.
  bool next_combination(Picks& picks) const {
    for (int64_t m = ndim_; m-- > 0;) {
      if (++picks[m] < per_dim_[m].size()) return true;
      picks[m] = 0;
    }
    return false;
  }

  // Reduces the candidates when there are more than kMaxCombinations combinations. Each mesh dim keeps the 8 candidates
  // that are cheapest when only this mesh dim changes, and the candidate with all inputs replicated, which is always
  // legal.
  void keep_cheapest_candidates() {
    constexpr size_t kKept = 8;
    for (int64_t m = 0; m < ndim_; ++m) {
      auto& list = per_dim_[m];
      std::vector<std::pair<double, size_t>> order;
      for (size_t s = 0; s < list.size(); ++s) {
        double total = 0;
        for (size_t i = 0; i < call_.inputs.size(); ++i) {
          Placements target = call_.inputs[i].placements;
          target[m] = list[s].inputs[i];
          total += cost(call_.inputs[i], target);
        }
        order.emplace_back(total, s);
      }
      std::ranges::stable_sort(order, [](const auto& a, const auto& b) { return a.first < b.first; });
      std::vector<Strategy> kept;
      for (size_t i = 0; i < order.size(); ++i) {
        if (i < kKept || is_whole(list[order[i].second])) kept.push_back(list[order[i].second]);
      }
      list = std::move(kept);
    }
  }

  const OpCall& call_;
  const Proposal& proposal_;
  size_t output_count_;
  const FixedOutputs& fixed_;
  int64_t ndim_;
  bool has_written_input_;
  std::vector<std::vector<Strategy>> per_dim_;
};

}  // namespace

PlacementChoice choose(const OpCall& call, const Proposal& proposal, size_t output_count, const FixedOutputs& fixed) {
  if (proposal.choice) return *proposal.choice;
  return StrategyChooser(call, proposal, output_count, fixed).choose();
}

}  // namespace tessera
