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
#include "tessera/checkpoint/share.h"
#include "tessera/checkpoint/snapshot_gate.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/watch/monitor.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

// The bytes of every rank, on rank 0 alone.
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
                  "{}: no rank wrote any of it. Not all ranks that are taken to hold it do; give "
                  "CheckpointOptions::holders",
                  quote(entry.name));
  }
}

}  // namespace

// A save has two threads on each rank: one writes, the other, `thread`, meets its peers in `group`. They meet in short
// rounds, so that no rank waits for a slow one longer than a round and the death of one is noticed as anywhere else.
struct CheckpointWriter::Impl {
  explicit Impl(CheckpointOptions given) : options(std::move(given)), folder(options.folder) {}

  CheckpointOptions options;
  CheckpointFolder folder;  // rank 0 uses it
  SnapshotPool pool;
  DeviceCopies device_copies;          // of the save under way
  std::shared_ptr<comm::Group> group;  // of all ranks and of the saves alone; made by the first one
  std::atomic<bool> failed{false};
  bool under_way = false;
  std::thread thread;
  std::atomic<bool> thread_over{false};
  std::unique_ptr<SnapshotGate> gate;  // of the save under way, where its copy is made in its thread
  Share share;                // what the save under way writes; this and the next two are the thread's until it ends
  std::string problem;        // why it failed
  std::exception_ptr broken;  // the ranks lost each other

  int rank() const { return options.world->rank(); }
  int size() const { return options.world->size(); }
  bool chief() const { return rank() == 0; }
  std::vector<int> all_ranks() const {
    std::vector<int> ranks(static_cast<size_t>(size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  std::vector<int> holders() const { return options.holders.empty() ? all_ranks() : options.holders; }

  std::filesystem::path stage(int64_t step);
  void save(const std::string& not_taken, Manifest manifest, const std::filesystem::path& staged);
  std::string write(const std::filesystem::path& staged);
  std::string publish(const std::vector<std::string>& reports, Manifest manifest, const std::filesystem::path& staged);
  std::string await_all(std::future<std::string> own);
  void join_and_check();
  void leave_failed_step();
};

// Rank 0 makes the folder, all ranks learn its name. COLLECTIVE over the world.
std::filesystem::path CheckpointWriter::Impl::stage(int64_t step) {
  std::string outcome;  // "+NAME" or "-ERROR"; the folder may be mounted elsewhere on another host
  if (chief()) {
    try {
      outcome = "+" + folder.stage(step).filename().string();
    } catch (const std::exception& error) {
      outcome = std::string("-") + error.what();
    }
  }
  outcome = comm::broadcast_bytes(*group, outcome);
  TESSERA_CHECK(outcome.starts_with('+'), ErrorKind::kIo, "[checkpoint.save] {}: not saved: {}",
                options.folder.string(), outcome.substr(1));
  return options.folder / outcome.substr(1);
}

// Waits until the task of every rank has ended. Returns this rank's result.
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

// This rank's report as JSON, {"error": ...} when it could not copy its tensors or write its file, or when they changed
// too early.
std::string CheckpointWriter::Impl::write(const std::filesystem::path& staged) {
  std::string report;
  try {
    if (DeviceCopies none; gate) copy_share(share, pool, none);  // those of a device are under way
    if (gate) gate->copied();
    device_copies.wait();
    report = write_share(share, staged, rank());
    const auto changed = gate ? gate->wait_settled() : "";
    TESSERA_CHECK(changed.empty(), ErrorKind::kIo, "{}", changed);
  } catch (const std::exception& error) {
    failed = true;
    report = failure_report(rank(), error);
  }
  if (gate) gate->copied();  // or given up
  return report;
}

// On rank 0. Returns "" or what went wrong.
std::string CheckpointWriter::Impl::publish(const std::vector<std::string>& reports, Manifest manifest,
                                            const std::filesystem::path& staged) {
  const auto hold = options.world->monitor().hold();  // all parts are there: nothing that happens to a peer undoes that
  try {
    CheckpointContents contents;
    for (const auto& report : reports) add_report(contents, report);
    check_written(contents.metadata);
    contents.publish_metadata(staged);  // what could not be loaded is not published
    manifest.files = std::move(contents.files);
    folder.publish(staged, std::move(manifest));
    return "";
  } catch (const std::exception& error) {
    folder.drop(staged);
    return error.what();
  }
}

// The whole save, in a thread of its own.
void CheckpointWriter::Impl::save(const std::string& not_taken, Manifest manifest,
                                  const std::filesystem::path& staged) {
  try {
    auto report =
        await_all(std::async(std::launch::async, [&] { return not_taken.empty() ? write(staged) : not_taken; }));
    const auto reports = gather_bytes(*group, report);
    problem = await_all(std::async(
        std::launch::async, [&] { return chief() ? publish(reports, std::move(manifest), staged) : std::string(); }));
    problem = comm::broadcast_bytes(*group, problem);
    failed = !problem.empty();
    if (chief() && problem.empty()) folder.prune(options.keep_last, options.keep_best);
  } catch (const std::exception&) {
    broken = std::current_exception();
    failed = true;
    if (chief()) folder.drop(staged);
  }
  if (gate) gate->copied();
}

void CheckpointWriter::Impl::join_and_check() {
  if (!under_way) return;
  under_way = false;
  if (gate) gate->settle();
  device_copies.hold_current();
  if (thread.joinable()) thread.join();
  gate.reset();
  give_back(std::exchange(share, {}), pool);
  failed = false;
  if (broken) std::rethrow_exception(std::exchange(broken, nullptr));
  if (problem.ends_with('.')) problem.pop_back();
  TESSERA_CHECK(problem.empty(), ErrorKind::kIo,
                "[checkpoint.save] {}: not saved: {}. Earlier checkpoints are untouched.", options.folder.string(),
                std::exchange(problem, ""));
}

CheckpointWriter::CheckpointWriter(CheckpointOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {
  if (impl_->chief()) impl_->folder.sweep();
}

// A rank that fails alone between save() and its next wait_for_snapshot() leaves its peers' writers waiting for owners
// that are in the middle of a step with it. Ranks that fail together still publish.
void CheckpointWriter::Impl::leave_failed_step() {
  if (!under_way || !gate || std::uncaught_exceptions() == 0) return;
  gate->settle();
  constexpr std::chrono::seconds kTogether(20), kToHear(5);
  const auto wait_for = [&](std::chrono::seconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!thread_over && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  };
  wait_for(kTogether);
  if (thread_over) return;
  options.world->monitor().give_up();
  wait_for(kToHear);
  if (!thread_over) options.world->abort();  // ranks that are threads hear of it once this one has unwound
}

CheckpointWriter::~CheckpointWriter() {
  try {
    impl_->leave_failed_step();
    impl_->join_and_check();
  } catch (const std::exception& error) {
    log_error("{}", error.what());
  }
}

void CheckpointWriter::save(int64_t step, const NamedTensors& tensors, const nlohmann::json& extra,
                            std::optional<double> validation_loss, const NamedObjects& objects) {
  impl_->join_and_check();
  if (!impl_->group) impl_->group = impl_->options.world->new_group(impl_->all_ranks(), "checkpoint");
  comm::attempt_together(*impl_->group, [&] { check_placements(tensors); });  // stages have tensors of their own
  const auto claims = comm::all_gather_bytes(*impl_->group, partial_mesh_claims(tensors, impl_->holders()));
  const auto staged = impl_->stage(step);
  Manifest manifest;
  manifest.step = step;
  manifest.world_size = impl_->size();
  manifest.validation_loss = validation_loss;
  manifest.extra = extra;
  const bool defer = impl_->options.async && impl_->options.defer_copy;
  std::string not_taken;  // the other ranks are told in the same way as of a file that cannot be written
  try {
    impl_->share =
        plan_share(tensors, objects, Writers(impl_->rank(), impl_->holders(), choose_meshes(claims, impl_->holders())));
    // A save that its caller waits for is written from where the tensors lie.
    const bool at_once = impl_->options.async && !defer;
    copy_share(impl_->share, impl_->pool, impl_->device_copies, at_once ? CopyWhat::kAll : CopyWhat::kWhatCannotWait);
    if (!defer) impl_->device_copies.hold_current();
    if (defer) impl_->gate = std::make_unique<SnapshotGate>(tensors);
  } catch (const std::exception& error) {
    not_taken = failure_report(impl_->rank(), error);
    impl_->device_copies.launched();
    impl_->device_copies.hold_current();
    impl_->device_copies.wait();
    give_back(std::exchange(impl_->share, {}), impl_->pool);
  }
  impl_->failed = !not_taken.empty();
  impl_->thread_over = false;
  impl_->thread = std::thread([this, not_taken, manifest = std::move(manifest), staged]() mutable {
    impl_->save(not_taken, std::move(manifest), staged);
    impl_->thread_over = true;
  });
  impl_->under_way = true;
  if (!impl_->options.async) impl_->join_and_check();
}

void CheckpointWriter::wait_for_snapshot() {
  if (!impl_->under_way || !impl_->gate) return;
  impl_->gate->settle();
  impl_->device_copies.hold_current();
}

void CheckpointWriter::finish() { impl_->join_and_check(); }

bool CheckpointWriter::failed() const { return impl_->failed; }

}  // namespace tessera
