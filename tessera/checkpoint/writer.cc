#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/rank_snapshot.h"
#include "tessera/checkpoint/snapshot_gate.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/watch/monitor.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

// Gathers the bytes of every rank on rank 0; the result is empty on other ranks. COLLECTIVE over the group.
std::vector<std::string> gather_bytes(comm::Group& group, const std::string& own) {
  const int size = group.size();
  auto lengths = at::empty({size}, at::kLong);
  comm::all_gather_into(group, lengths, at::full({1}, static_cast<int64_t>(own.size()), at::kLong), "report lengths")
      .wait();
  const auto* length = lengths.const_data_ptr<int64_t>();
  std::vector<int64_t> from(size, 0), to(size, 0);
  to[0] = static_cast<int64_t>(own.size());
  if (group.rank() == 0) from.assign(length, length + size);
  auto sent = at::empty({to[0]}, at::kByte);
  std::copy(own.begin(), own.end(), sent.mutable_data_ptr<uint8_t>());
  auto all = at::empty({std::accumulate(from.begin(), from.end(), int64_t{0})}, at::kByte);
  comm::all_to_all_single(group, all, sent, from, to, "reports").wait();
  std::vector<std::string> reports;
  const auto* begin = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>());
  for (int rank = 0; group.rank() == 0 && rank < size; begin += from[rank++]) reports.emplace_back(begin, from[rank]);
  return reports;
}

void check_written(const DcpMetadata& metadata) {
  for (const auto& entry : metadata.entries) {
    TESSERA_CHECK(!entry.tensor || !entry.tensor->chunks.empty(), ErrorKind::kIo,
                  "{}: no rank wrote any of it, because not all ranks that should hold it do. Set "
                  "CheckpointOptions::stage_ranks",
                  quote(entry.name));
  }
}

}  // namespace

// A save uses two threads on each rank: a std::async task copies the tensors and writes the file, and `thread` calls
// the collectives of `group`. While some rank still writes, the `thread`s repeat a short all-gather (await_all).
// Therefore no collective waits long for a slow rank, and the death of a rank is detected as in any other collective.
struct CheckpointWriter::Impl {
  explicit Impl(CheckpointOptions checkpoint_options)
      : options(std::move(checkpoint_options)), folder(options.folder) {}

  CheckpointOptions options;
  CheckpointFolder folder;  // used by rank 0
  SnapshotPool pool;
  DeviceCopies device_copies;          // of the running save
  std::shared_ptr<comm::Group> group;  // all ranks; used by saves only, created by the first save
  std::atomic<bool> failed{false};
  bool is_save_running = false;
  std::thread thread;
  std::atomic<bool> is_thread_done{false};
  std::unique_ptr<SnapshotGate> gate;  // of the running save, when its copy is deferred
  RankSnapshot snapshot;               // of the running save; until `thread` ends it owns this and the next two members
  std::string problem;                 // error of the save; empty: none
  std::exception_ptr collective_error;  // a collective of the save failed

  int rank() const { return options.world->rank(); }
  int size() const { return options.world->size(); }
  bool is_rank_zero() const { return rank() == 0; }
  std::vector<int> all_ranks() const {
    std::vector<int> ranks(static_cast<size_t>(size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  std::vector<int> stage_ranks() const { return options.stage_ranks.empty() ? all_ranks() : options.stage_ranks; }

  std::filesystem::path create_staged(int64_t step);
  void save(const std::string& copy_failure_report, Manifest manifest, const std::filesystem::path& staged);
  std::string write(const std::filesystem::path& staged);
  std::string publish(const std::vector<std::string>& reports, Manifest manifest, const std::filesystem::path& staged);
  std::string await_all(std::future<std::string> own);
  void join_and_check();
  void abandon_failed_step();
};

// Rank 0 creates the folder and broadcasts its name. COLLECTIVE over the world.
std::filesystem::path CheckpointWriter::Impl::create_staged(int64_t step) {
  std::string outcome;  // "+NAME" or "-ERROR"; only the name is sent, as hosts may mount the folder at other paths
  if (is_rank_zero()) {
    try {
      outcome = "+" + folder.create_staged(step).filename().string();
    } catch (const std::exception& error) {
      outcome = std::string("-") + error.what();
    }
  }
  outcome = comm::broadcast_bytes(*group, outcome);
  TESSERA_CHECK(outcome.starts_with('+'), ErrorKind::kIo, "[checkpoint.save] {}: not saved: {}",
                options.folder.string(), outcome.substr(1));
  return options.folder / outcome.substr(1);
}

// Waits until the std::async tasks of all ranks have ended. Returns the result of this rank's task, `own`. The ranks
// all-gather whether their tasks have ended, once per round; a round takes a quarter of the world's timeout, but at
// least 50 ms and at most 1 s. COLLECTIVE over `group`.
std::string CheckpointWriter::Impl::await_all(std::future<std::string> own) {
  const auto round = std::clamp<milliseconds>(options.world->timeout() / 4, milliseconds(50), milliseconds(1000));
  auto all = at::empty({size()}, at::kByte);
  for (bool ended = false; !ended;) {
    const bool ready = own.wait_for(round) == std::future_status::ready;
    comm::all_gather_into(*group, all, at::full({1}, ready ? 1 : 0, at::kByte), "save under way").wait();
    const auto* flags = all.const_data_ptr<uint8_t>();
    ended = std::all_of(flags, flags + size(), [](uint8_t flag) { return flag != 0; });
  }
  return own.get();
}

// Makes this rank's copies of the tensors and writes this rank's file. Returns the report as JSON. The report is
// {"error": ...} when a copy or the file failed, or when a tensor was changed before its copy was complete.
std::string CheckpointWriter::Impl::write(const std::filesystem::path& staged) {
  std::string report;
  try {
    if (DeviceCopies none; gate) copy_snapshot(snapshot, pool, none);  // device tensors are being copied already
    if (gate) gate->mark_copied();
    device_copies.wait();
    report = write_snapshot(snapshot, staged, rank());
    const auto changed = gate ? gate->wait_for_check() : "";
    TESSERA_CHECK(changed.empty(), ErrorKind::kIo, "{}", changed);
  } catch (const std::exception& error) {
    failed = true;
    report = failure_report(rank(), error);
  }
  if (gate) gate->mark_copied();  // also after a failure
  return report;
}

// On rank 0, after all ranks have written their files: writes the checkpoint's metadata and manifest, gives its folder
// its final name, and names it in LATEST. Returns "", or the error message; after an error the staged folder is
// deleted.
std::string CheckpointWriter::Impl::publish(const std::vector<std::string>& reports, Manifest manifest,
                                            const std::filesystem::path& staged) {
  // All ranks' files are complete, so publishing must go on even if another rank fails meanwhile. Therefore hold()
  // makes the monitor wait longer before it ends this process.
  const auto hold = options.world->monitor().hold();
  try {
    CheckpointContents contents;
    for (const auto& report : reports) add_report(contents, report);
    check_written(contents.metadata);
    contents.publish_metadata(staged);  // throws for metadata that could not be loaded
    manifest.files = std::move(contents.files);
    folder.publish(staged, std::move(manifest));
    return "";
  } catch (const std::exception& error) {
    folder.discard_staged(staged);
    return error.what();
  }
}

// The function that `thread` runs: writes the file, gathers the reports on rank 0, publishes on rank 0, and broadcasts
// the result. A rank whose copy or file failed calls the same collectives as the other ranks. COLLECTIVE over `group`.
void CheckpointWriter::Impl::save(const std::string& copy_failure_report, Manifest manifest,
                                  const std::filesystem::path& staged) {
  try {
    auto report = await_all(std::async(
        std::launch::async, [&] { return copy_failure_report.empty() ? write(staged) : copy_failure_report; }));
    const auto reports = gather_bytes(*group, report);
    problem = await_all(std::async(std::launch::async, [&] {
      return is_rank_zero() ? publish(reports, std::move(manifest), staged) : std::string();
    }));
    problem = comm::broadcast_bytes(*group, problem);
    failed = !problem.empty();
    if (is_rank_zero() && problem.empty()) folder.prune(options.keep_last, options.keep_best);
  } catch (const std::exception&) {
    collective_error = std::current_exception();
    failed = true;
    if (is_rank_zero()) folder.discard_staged(staged);
  }
  if (gate) gate->mark_copied();
}

// Waits until the running save has ended, and throws its error. gate->wait_and_check() must come before thread.join(),
// because `thread` waits for it in SnapshotGate::wait_for_check().
void CheckpointWriter::Impl::join_and_check() {
  if (!is_save_running) return;
  is_save_running = false;
  if (gate) gate->wait_and_check();
  device_copies.block_current_stream();
  if (thread.joinable()) thread.join();
  gate.reset();
  recycle_memory(std::exchange(snapshot, {}), pool);
  failed = false;
  if (collective_error) std::rethrow_exception(std::exchange(collective_error, nullptr));
  if (problem.ends_with('.')) problem.pop_back();
  TESSERA_CHECK(problem.empty(), ErrorKind::kIo,
                "[checkpoint.save] {}: not saved: {}. Earlier checkpoints are untouched.", options.folder.string(),
                std::exchange(problem, ""));
}

CheckpointWriter::CheckpointWriter(CheckpointOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {
  if (impl_->is_rank_zero()) impl_->folder.remove_leftovers();
}

// Called when the writer is destroyed. Handles the case that an exception on this rank ends the training step while a
// save runs. If all ranks threw, the save can still be published, so this rank first waits up to 20 s for the save. If
// only this rank threw, the save cannot end: on the other ranks `thread` waits for wait_and_check(), and the thread
// that would call it waits for this rank in a collective of the step. This rank then reports its failure to the other
// ranks, and aborts the world if the save has not ended 5 s later.
void CheckpointWriter::Impl::abandon_failed_step() {
  if (!is_save_running || !gate || std::uncaught_exceptions() == 0) return;
  gate->wait_and_check();
  constexpr std::chrono::seconds kSaveGrace(20), kReportGrace(5);
  const auto wait_for = [&](std::chrono::seconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!is_thread_done && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  };
  wait_for(kSaveGrace);
  if (is_thread_done) return;
  options.world->monitor().report_own_failure();
  wait_for(kReportGrace);
  if (!is_thread_done) options.world->abort();  // ranks that are threads get the report after this thread has unwound
}

CheckpointWriter::~CheckpointWriter() {
  try {
    impl_->abandon_failed_step();
    impl_->join_and_check();
  } catch (const std::exception& error) {
    log_error("{}", error.what());
  }
}

void CheckpointWriter::save(int64_t step, const NamedTensors& tensors, const nlohmann::json& extra,
                            std::optional<double> validation_loss, const NamedObjects& objects) {
  impl_->join_and_check();
  if (!impl_->group) impl_->group = impl_->options.world->new_group(impl_->all_ranks(), "checkpoint");
  comm::attempt_together(*impl_->group, [&] { check_placements(tensors); });  // pipeline stages have different tensors
  const auto claims = comm::all_gather_bytes(*impl_->group, partial_mesh_claims(tensors, impl_->stage_ranks()));
  const auto staged = impl_->create_staged(step);
  Manifest manifest;
  manifest.step = step;
  manifest.world_size = impl_->size();
  manifest.validation_loss = validation_loss;
  manifest.extra = extra;
  const bool defer = impl_->options.async && impl_->options.defer_copy;
  std::string copy_failure_report;  // sent to the other ranks like a failed write
  try {
    impl_->snapshot = plan_snapshot(
        tensors, objects,
        WriterAssignment(impl_->rank(), impl_->stage_ranks(), choose_meshes(claims, impl_->stage_ranks())));
    // Without async, save() returns only after the file is written, so CPU tensors need no copy.
    const bool at_once = impl_->options.async && !defer;
    copy_snapshot(impl_->snapshot, impl_->pool, impl_->device_copies,
                  at_once ? SnapshotCopyMode::kAll : SnapshotCopyMode::kOnlyUndeferrable);
    if (!defer) impl_->device_copies.block_current_stream();
    if (defer) impl_->gate = std::make_unique<SnapshotGate>(tensors);
  } catch (const std::exception& error) {
    copy_failure_report = failure_report(impl_->rank(), error);
    impl_->device_copies.record_launched();
    impl_->device_copies.block_current_stream();
    impl_->device_copies.wait();
    recycle_memory(std::exchange(impl_->snapshot, {}), impl_->pool);
  }
  impl_->failed = !copy_failure_report.empty();
  impl_->is_thread_done = false;
  impl_->thread = std::thread([this, copy_failure_report, manifest = std::move(manifest), staged]() mutable {
    impl_->save(copy_failure_report, std::move(manifest), staged);
    impl_->is_thread_done = true;
  });
  impl_->is_save_running = true;
  if (!impl_->options.async) impl_->join_and_check();
}

void CheckpointWriter::wait_for_snapshot() {
  if (!impl_->is_save_running || !impl_->gate) return;
  impl_->gate->wait_and_check();
  impl_->device_copies.block_current_stream();
}

void CheckpointWriter::finish() { impl_->join_and_check(); }

bool CheckpointWriter::failed() const { return impl_->failed; }

}  // namespace tessera
