#include "tessera/parallel/pipeline/schedules.h"

#include <algorithm>
#include <cctype>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/parallel/pipeline/check_schedule.h"
#include "tessera/parallel/pipeline/detail/schedule_makers.h"

namespace tessera::pipeline {
namespace {

struct KnownSchedule {
  ScheduleTraits traits;
  detail::ScheduleRows (*rows)(const ScheduleSize& size);
};

const std::vector<KnownSchedule>& known_schedules() {
  static const std::vector<KnownSchedule> known = {
      {{.name = "1F1B", .one_stage_per_rank = true}, detail::one_forward_one_backward_rows},
      {{.name = "Interleaved1F1B"}, [](const ScheduleSize& size) { return detail::interleaved_rows(size, false); }},
      {{.name = "GPipe", .one_stage_per_rank = true},
       [](const ScheduleSize& size) { return detail::forwards_then_backwards_rows(size, false); }},
      {{.name = "LoopedBFS"},
       [](const ScheduleSize& size) { return detail::forwards_then_backwards_rows(size, true); }},
      {{.name = "InterleavedZeroBubble", .splits_backward = true},
       [](const ScheduleSize& size) { return detail::interleaved_rows(size, true); }},
      {{.name = "ZBVZeroBubble", .style = StageStyle::kV, .splits_backward = true}, detail::zbv_rows},
      {{.name = "DualPipeV", .style = StageStyle::kV, .splits_backward = true}, detail::dual_pipe_v_rows}};
  return known;
}

const KnownSchedule& find_schedule(std::string_view name) {
  const auto lower = [](unsigned char c) { return std::tolower(c); };
  for (const auto& each : known_schedules()) {
    if (std::ranges::equal(each.traits.name, name, {}, lower, lower)) return each;
  }
  raise(ErrorKind::kConfig,
        "[pipeline.schedule] Unknown schedule name {}. The valid options are ['1F1B', 'Interleaved1F1B', 'GPipe', "
        "'LoopedBFS', 'InterleavedZeroBubble', 'ZBVZeroBubble', 'DualPipeV']",
        quote(name));
}

}  // namespace

std::vector<int> stage_to_rank(int ranks, int stages, StageStyle style) {
  TESSERA_CHECK(ranks > 0 && stages > 0 && stages % ranks == 0, ErrorKind::kConfig,
                "[pipeline.schedule] num_stages {} must be evenly divisible by pp_size {}", stages, ranks);
  std::vector<int> out;
  for (int stage = 0; stage < stages; ++stage) {
    const int round = stage / ranks, place = stage % ranks;
    out.push_back(style == StageStyle::kV && round % 2 == 1 ? ranks - 1 - place : place);
  }
  return out;
}

std::vector<int> stages_of_rank(const std::vector<int>& rank_of, int rank) {
  std::vector<int> out;
  for (size_t stage = 0; stage < rank_of.size(); ++stage) {
    if (rank_of[stage] == rank) out.push_back(static_cast<int>(stage));
  }
  return out;
}

ScheduleTraits schedule_traits(std::string_view name) { return find_schedule(name).traits; }

Schedule make_schedule(std::string_view name, const ScheduleSize& size) {
  const auto& [traits, rows] = find_schedule(name);
  TESSERA_CHECK(size.ranks > 0 && size.stages_per_rank > 0 && size.micro_batches > 0, ErrorKind::kConfig,
                "[pipeline.schedule] {}: {} ranks, {} stages a rank, {} micro-batches: wanted at least one of each",
                traits.name, size.ranks, size.stages_per_rank, size.micro_batches);
  TESSERA_CHECK(!traits.one_stage_per_rank || size.stages_per_rank == 1, ErrorKind::kConfig,
                "[pipeline.schedule] {}: found {} stages a rank, wanted one. Use Interleaved1F1B for several.",
                traits.name, size.stages_per_rank);
  TESSERA_CHECK(traits.style != StageStyle::kV || size.stages_per_rank == 2, ErrorKind::kConfig,
                "[pipeline.schedule] {} requires exactly 2 stages per rank, but got {}.",
                traits.name == "ZBVZeroBubble" ? "ZBV" : traits.name, size.stages_per_rank);
  // A V schedule maps stage s and stage 2 * ranks - 1 - s to the same rank, so the last rank passes its output to
  // itself.
  return {.name = traits.name,
          .micro_batches = size.micro_batches,
          .rank_of = stage_to_rank(size.ranks, size.ranks * size.stages_per_rank, traits.style),
          .table = {rows(size)}};
}

Schedule schedule_of_table(ScheduleTable table, const std::string& name) {
  int stages = 0, micro_batches = 0;
  for (const auto& row : table.ranks) {
    for (const auto& step : steps_of(row)) {
      stages = std::max(stages, step.action.stage + 1);
      micro_batches = std::max(micro_batches, step.action.micro_batch + 1);
    }
  }
  const auto ranks = static_cast<int>(table.ranks.size());
  auto rank_of = check_schedule(table, {.ranks = ranks, .stages = stages, .micro_batches = micro_batches});
  return {.name = name, .micro_batches = micro_batches, .rank_of = std::move(rank_of), .table = std::move(table)};
}

}  // namespace tessera::pipeline
