#include "tessera/train/profile/step_profile.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/base/machine/host.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/collectives/communication_time.h"
#include "tessera/comm/watch/monitor.h"

namespace tessera::train {
namespace {

constexpr size_t kMostRanksSummed = 64;  // the summary lists at most the first 64 ranks
constexpr size_t kMostRows = 20;         // rows in a table of the summary

int64_t epoch_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// A module path with "*" for each number, so that the layers of a model make one row: "model.layers.*.mlp".
std::string without_numbers(const std::string& path) {
  std::string out;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const auto part = path.substr(begin, end - begin);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == part.npos;
    out += (begin > 0 ? "." : "") + (number ? "*" : part);
    begin = end + 1;
  }
  return out;
}

nlohmann::ordered_json longest_rows(const std::map<std::string, TraceTotals>& all) {
  std::vector<std::pair<std::string, TraceTotals>> rows(all.begin(), all.end());
  std::ranges::sort(rows, [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  if (rows.size() > kMostRows) rows.resize(kMostRows);
  auto out = nlohmann::ordered_json::array();
  for (const auto& [name, totals] : rows) {
    out.push_back({{"name", name}, {"calls", totals.calls}, {"seconds", totals.seconds}});
  }
  return out;
}

std::filesystem::path trace_path(const std::filesystem::path& folder, int rank) {
  return folder / fmt::format("trace-{:05}.json", rank);
}

// The length of the union of the intervals, in seconds.
double union_seconds(std::vector<std::pair<int64_t, int64_t>> intervals_us) {
  std::ranges::sort(intervals_us);
  int64_t sum = 0, until = INT64_MIN;
  for (const auto& [begin, end] : intervals_us) {
    sum += std::max<int64_t>(end - std::max(begin, until), 0);
    until = std::max(until, end);
  }
  return static_cast<double>(sum) * 1e-6;
}

}  // namespace

// Records the bytes of each collective, as comm::CollectiveObserver reports them. The key of a collective is its group,
// sequence number and operation, as in the flight recorder. Point-to-point messages have other sequence numbers, so
// they are not recorded here; read_collectives() computes their bytes from the tensor.
struct StepProfile::CollectiveBytes final : comm::CollectiveObserver {
  using Key = std::tuple<uint32_t, uint64_t, comm::Op>;
  void on_collective(comm::Op op, int64_t bytes, const comm::Group& group) override {
    const std::lock_guard lock(mutex);
    if (!comm::is_message(op)) by_call[{group.context().id, group.sequence(), op}] = bytes;
  }
  std::mutex mutex;
  std::map<Key, int64_t> by_call;
};

ProfiledSteps profiled_steps(int64_t first_step, int64_t total_steps) {
  constexpr int64_t kWarmUp = 3, kSteps = 3;
  const int64_t left = std::max<int64_t>(total_steps - first_step, 0);
  const int64_t warm_up = std::clamp<int64_t>(left - 1, 0, kWarmUp);
  const int64_t steps = std::min(left - warm_up, kSteps);
  return {first_step + warm_up + 1, first_step + warm_up + steps};
}

StepProfile::StepProfile(nn::Module& model, std::shared_ptr<comm::Group> group, StepProfileOptions options)
    : model_(model), group_(std::move(group)), options_(std::move(options)) {
  metadata_.rank = group_->rank();
  metadata_.host = host_name();
  metadata_.first_step = options_.steps.first;
  metadata_.last_step = options_.steps.last;
}

StepProfile::~StepProfile() { unhook_modules(); }

void StepProfile::hook_modules() {
  for (const auto& [name, module] : model_.named_modules()) {
    const auto shown = name.empty() ? std::string("model") : name;
    hooks_.push_back(
        {module,
         {module->register_forward_pre_hook(
              [this, shown](nn::Module&, nn::TensorRefs&) { recorder_.begin_event(TraceKind::kModule, shown); }),
          module->register_forward_hook([this](nn::Module&, nn::TensorRefs&) { recorder_.end_event(); })}});
  }
}

void StepProfile::unhook_modules() {
  for (const auto& [module, ids] : hooks_) {
    for (const int id : ids) module->remove_hook(id);
  }
  hooks_.clear();
}

void StepProfile::begin(int64_t step) {
  if (step < options_.steps.first || step > options_.steps.last) return;
  if (step == options_.steps.first) {
    // Time 0 of the traces of all ranks is the time of rank 0's clock at the beginning of the first profiled step.
    const auto gathered = comm::all_gather_bytes(*group_, std::to_string(epoch_us()));
    metadata_.base_us = std::stoll(gathered.front());
    remove_old_traces(gathered.size());
    metadata_.steady_offset_us = epoch_us() - trace_clock_ns() / 1000;
    hook_modules();
    collective_bytes_ = std::make_unique<CollectiveBytes>();
    recorder_.start();
  }
  if (const auto& monitor = group_->context().monitor) calls_made_ = monitor->recorder().record("").calls_made;
  communication_seconds_at_begin_ = comm::communication_seconds();
  begun_ns_ = trace_clock_ns();
  recorder_.begin_event(TraceKind::kSpan, fmt::format("step {}", step));
}

std::optional<nlohmann::ordered_json> StepProfile::end(int64_t step) {
  if (step < options_.steps.first || step > options_.steps.last) return std::nullopt;
  recorder_.end_event();
  seconds_["step"] += static_cast<double>(trace_clock_ns() - begun_ns_) * 1e-9;
  seconds_["collectives"] += comm::communication_seconds() - communication_seconds_at_begin_;
  read_collectives();
  ended_ = step;
  if (step < options_.steps.last) return std::nullopt;
  return close();
}

nlohmann::ordered_json StepProfile::close() {
  recorder_.stop();
  collective_bytes_.reset();
  unhook_modules();
  closed_ = true;
  metadata_.last_step = ended_;
  write();
  return summary_of_all();
}

std::optional<nlohmann::ordered_json> StepProfile::finish() {
  if (closed_ || options_.steps.last < options_.steps.first) return std::nullopt;
  closed_ = true;
  if (ended_ < 0) {
    if (metadata_.rank == 0) {
      log_warning("[train.profile] nothing was traced: the run ended before step {}", options_.steps.first);
    }
    return std::nullopt;
  }
  if (metadata_.rank == 0) log_warning("[train.profile] cut off: the run ended before step {}", options_.steps.last);
  return close();
}

// Removes the trace of this rank, and on rank 0 those of ranks that this run does not have. Otherwise traces of an
// earlier session would remain next to the new ones.
void StepProfile::remove_old_traces(size_t ranks) const {
  std::error_code error;
  std::filesystem::remove(trace_path(options_.folder, metadata_.rank), error);
  if (metadata_.rank != 0) return;
  std::vector<std::filesystem::path> old;
  for (std::filesystem::directory_iterator entry(options_.folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const auto name = entry->path().filename().string();
    int rank = 0, length = 0;
    const bool trace =
        std::sscanf(name.c_str(), "trace-%d.json%n", &rank, &length) == 1 && static_cast<size_t>(length) == name.size();
    if (trace && rank >= 0 && static_cast<size_t>(rank) >= ranks) old.push_back(entry->path());
  }
  for (const auto& path : old) std::filesystem::remove(path, error);
}

void StepProfile::add_seconds(const std::string& part, double seconds) {
  if (recorder_.recording()) seconds_[part] += seconds;
}

// Takes the calls of this step out of the flight recorder, which keeps the last 2,000; calls that it has lost are
// counted. A call belongs to the training thread (`on_training_thread`) if the observer saw it on that thread; other
// calls come from background saves, and do not hold up the step.
void StepProfile::read_collectives() {
  const auto& monitor = group_->context().monitor;
  if (!monitor) return;
  const auto record = monitor->recorder().record("profile");
  const uint64_t made = record.calls_made - calls_made_;
  const size_t kept = std::min<size_t>(made, record.calls.size());
  metadata_.lost_collectives += static_cast<int64_t>(made - kept);
  std::vector<std::pair<int64_t, int64_t>> in_progress;
  for (size_t i = record.calls.size() - kept; i < record.calls.size(); ++i) {
    const auto& call = record.calls[i];
    const auto& signature = call.signature;
    const auto found = collective_bytes_->by_call.find({signature.members, signature.sequence, signature.op});
    const auto element = signature.dtype < 0 ? 0 : c10::elementSize(static_cast<c10::ScalarType>(signature.dtype));
    const int64_t bytes =
        found != collective_bytes_->by_call.end() ? found->second : signature.elements * static_cast<int64_t>(element);
    // The observer in CollectiveBytes is installed on the training thread alone, so a collective that it did not record
    // was called on another thread. It never records sends, receives and calls that transfer no bytes; these count as
    // calls of the training thread.
    const bool on_training_thread =
        found != collective_bytes_->by_call.end() || comm::is_message(signature.op) || bytes == 0;
    collectives_.push_back({call, bytes, on_training_thread});
    if (!on_training_thread) continue;
    // For a call that is still in progress, the time at which the flight record was written is used as its end.
    const int64_t end = call.finished_us > 0 ? call.finished_us : record.written_us;
    in_progress.push_back({call.started_us, end});
    if (call.waiting_us > 0) {
      seconds_["waited"] += static_cast<double>(std::max<int64_t>(end - call.waiting_us, 0)) * 1e-6;
    }
  }
  in_progress_seconds_ += union_seconds(std::move(in_progress));
}

void StepProfile::write() const {
  const auto path = trace_path(options_.folder, metadata_.rank);
  try {
    std::error_code error;
    std::filesystem::create_directories(options_.folder, error);
    publish_file(path, trace_json(recorder_, collectives_, metadata_));
    if (metadata_.rank == 0) {
      log_info("[train.profile] steps {} to {} are in {}; open a file in https://ui.perfetto.dev", metadata_.first_step,
               metadata_.last_step, options_.folder.string());
    }
  } catch (const Error& error) {
    log_warning("[train.profile] the trace is lost: {}", error.what());
  }
}

// Parts of the profiled steps on this rank, in seconds. `hidden` is the fraction of the time with a collective in
// progress in which the training thread did something else than wait for collectives.
nlohmann::ordered_json StepProfile::own_summary() {
  const double collectives = seconds_["collectives"], waited = std::min(seconds_["waited"], collectives);
  const double hidden = in_progress_seconds_ > 0 ? std::clamp(1 - collectives / in_progress_seconds_, 0.0, 1.0) : 0;
  return {{"rank", metadata_.rank},
          {"compute", std::max(seconds_["step"] - collectives - seconds_["data"] - seconds_["snapshot"], 0.0)},
          {"communication", collectives - waited},
          {"wait", waited},
          {"data", seconds_["data"]},
          {"checkpoint", seconds_["checkpoint"]},
          {"hidden", hidden},
          {"dropped", recorder_.dropped()}};
}

// Gathers one JSON object per rank. Tables of operations, modules and collectives are rank 0's only, because ranks of a
// run do the same work. COLLECTIVE over the group.
nlohmann::ordered_json StepProfile::summary_of_all() {
  auto own = own_summary();
  if (metadata_.rank == 0) {
    // The layers of a model are summed up: "model.layers.*.mlp" stands for all of them.
    std::map<std::string, TraceTotals> modules;
    for (const auto& [name, totals] : recorder_.modules()) {
      auto& sum = modules[without_numbers(name)];
      sum.calls += totals.calls;
      sum.seconds += totals.seconds;
    }
    own["operations"] = longest_rows(recorder_.operations());
    own["modules"] = longest_rows(modules);
    struct Sum {
      int64_t calls = 0, bytes = 0;
      double waited = 0;
    };
    std::map<std::pair<std::string, std::string>, Sum> groups;
    for (const auto& [call, bytes, mine] : collectives_) {
      auto& sum = groups[{comm::to_string(call.signature.op), call.signature.group}];
      ++sum.calls;
      sum.bytes += bytes;
      if (mine && call.waiting_us > 0) {
        sum.waited += static_cast<double>(std::max<int64_t>(call.finished_us - call.waiting_us, 0)) * 1e-6;
      }
    }
    own["collectives"] = nlohmann::ordered_json::array();
    for (const auto& [key, sum] : groups) {
      if (own["collectives"].size() == kMostRows) break;
      own["collectives"].push_back({{"name", key.first},
                                    {"group", key.second},
                                    {"calls", sum.calls},
                                    {"bytes", sum.bytes},
                                    {"seconds", sum.waited}});
    }
  }
  const auto gathered = comm::all_gather_bytes(*group_, dump_json(own));
  nlohmann::ordered_json out = {{"first_step", metadata_.first_step}, {"last_step", metadata_.last_step}};
  for (size_t rank = 0; rank < std::min(gathered.size(), kMostRanksSummed); ++rank) {
    auto row = parse_json_object(gathered[rank], "[train.profile] summary of a rank");
    for (const char* table : {"operations", "modules", "collectives"}) {
      if (!row.contains(table)) continue;
      out[table] = row[table];
      row.erase(table);
    }
    out["ranks"].push_back(std::move(row));
  }
  return out;
}

}  // namespace tessera::train
