#include <fmt/ranges.h>
#include <unistd.h>

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/log.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/safetensors_writer.h"

namespace tessera {
namespace {

// One rank's share of a save: its copies, and where each lies in its global tensor.
struct Share {
  NamedTensors tensors;
  std::vector<ManifestPart> parts;
  std::vector<std::pair<c10::ScalarType, std::vector<int64_t>>> globals;
};

bool first_replica(const at::Tensor& tensor) {
  const auto& coordinate = device_mesh(tensor)->coordinate();
  if (!coordinate) return false;
  for (size_t dim = 0; dim < placements(tensor).size(); ++dim) {
    if (placements(tensor)[dim].is_replicate() && (*coordinate)[dim] != 0) return false;
  }
  return true;
}

Share take_share(const NamedTensors& tensors, int rank) {
  const at::NoGradGuard no_grad;
  Share share;
  for (const auto& [name, tensor] : tensors) {
    ManifestPart part;
    at::Tensor local;
    if (is_dtensor(tensor)) {
      for (const auto& placement : placements(tensor)) {
        TESSERA_CHECK(placement.is_shard() || placement.is_replicate(), ErrorKind::kShape,
                      "[checkpoint.save] {}: placements {}; only Shard and Replicate can be saved. Redistribute it first.",
                      name, to_string(placements(tensor)));
      }
      if (!first_replica(tensor)) continue;
      auto box = local_box(tensor.sizes().vec(), *device_mesh(tensor), placements(tensor));
      local = to_local(tensor);
      part.offset = std::move(box.offset);
    } else {
      if (rank != 0) continue;
      local = tensor;
      part.offset.assign(static_cast<size_t>(tensor.dim()), 0);
    }
    part.file = static_cast<size_t>(rank);
    part.shape = local.sizes().vec();
    share.tensors.emplace_back(name, local.detach().to(at::kCPU, local.scalar_type(), false, true));
    share.parts.push_back(std::move(part));
    share.globals.emplace_back(tensor.scalar_type(), tensor.sizes().vec());
  }
  return share;
}

std::string step_name(int64_t step) { return fmt::format("step-{:08}", step); }

void write_tensors(const std::filesystem::path& path, const NamedTensors& tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  SafetensorsWriter writer(path, std::move(specs));
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.finish();
}

// Writes this rank's file into the staged folder and returns what the manifest needs to know of it, or {"error": ...}.
nlohmann::json write_share(const Share& share, const std::filesystem::path& staged, int rank, int size) {
  const auto name = fmt::format("rank-{:05}-of-{:05}.safetensors", rank, size);
  try {
    write_tensors(staged / name, share.tensors);
    nlohmann::json tensors = nlohmann::json::array();
    for (size_t i = 0; i < share.tensors.size(); ++i) {
      tensors.push_back({{"name", share.tensors[i].first},
                         {"dtype", static_cast<int>(share.globals[i].first)},
                         {"shape", share.globals[i].second},
                         {"part", part_to_json(share.parts[i])}});
    }
    return {{"file", name},
            {"bytes", std::filesystem::file_size(staged / name)},
            {"xxh3", hash_file(staged / name)},
            {"tensors", std::move(tensors)}};
  } catch (const std::exception& error) {
    return {{"error", fmt::format("rank {}: {}", rank, error.what())}};
  }
}

void add_rank(Manifest& manifest, const nlohmann::json& report) {
  manifest.files.push_back({report.at("file"), report.at("bytes"), report.at("xxh3")});
  for (const auto& each : report.at("tensors")) {
    auto& tensor = manifest.tensors[each.at("name")];
    tensor.dtype = static_cast<c10::ScalarType>(each.at("dtype").get<int>());
    tensor.shape = each.at("shape").get<std::vector<int64_t>>();
    const auto& part = each.at("part");
    tensor.parts.push_back({part.at("file"), part.at("offset").get<std::vector<int64_t>>(),
                            part.at("shape").get<std::vector<int64_t>>()});
  }
}

}  // namespace

struct CheckpointWriter::Impl {
  CheckpointOptions options;
  int64_t serial = 0;  // of this writer in its world
  int64_t saves = 0;   // counted alike on all ranks; both are part of the store keys
  std::atomic<bool> failed{false};
  std::thread thread;
  bool under_way = false;

  int rank() const { return options.world->rank(); }
  int size() const { return options.world->size(); }
  std::string key(const std::string& what) const { return fmt::format("checkpoint/{}/{}/{}", serial, saves, what); }

  void put(const std::string& key, const std::string& value) {
    options.world->store().set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  // Polls: a blocking get would hold the store's lock against the training thread.
  std::string await(const std::string& key) {
    auto& store = options.world->store();
    const auto deadline = std::chrono::steady_clock::now() + options.world->timeout();
    while (!store.check({key})) {
      TESSERA_CHECK(std::chrono::steady_clock::now() < deadline, ErrorKind::kComm,
                    "[checkpoint.save] {} did not come within {} s (rank {})", key, options.world->timeout().count() / 1000,
                    rank());
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    const auto bytes = store.get(key);
    return {bytes.begin(), bytes.end()};
  }

  void run(const Share& share, Manifest manifest);
  std::string publish(Manifest manifest, const nlohmann::json& own);
  void prune();
  void join_and_check();
};

// On rank 0: gathers the ranks' reports, writes the manifest, renames. Returns "" or what went wrong.
std::string CheckpointWriter::Impl::publish(Manifest manifest, const nlohmann::json& own) {
  const auto name = step_name(manifest.step);
  const auto staged = options.folder / (name + ".tmp");
  std::string problem;
  try {
    for (int each = 0; each < size(); ++each) {
      const auto report = each == 0 ? own : nlohmann::json::parse(await(key(fmt::format("rank{}", each))));
      if (report.contains("error")) {
        if (problem.empty()) problem = report["error"];
      } else if (problem.empty()) {
        add_rank(manifest, report);
      }
    }
    if (problem.empty()) {
      publish_file(staged / "manifest.json", manifest.dump());
      const auto final = options.folder / name;
      std::filesystem::remove_all(final);
      std::filesystem::rename(staged, final);
      sync_folder(options.folder);
      publish_file(options.folder / "LATEST", name + "\n");
      prune();
    }
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (!problem.empty()) {
    std::error_code ignored;
    std::filesystem::remove_all(staged, ignored);
  }
  return problem;
}

void CheckpointWriter::Impl::run(const Share& share, Manifest manifest) {
  const auto report = write_share(share, options.folder / (step_name(manifest.step) + ".tmp"), rank(), size());
  if (rank() == 0) {
    const auto problem = publish(std::move(manifest), report);
    put(key("verdict"), problem.empty() ? "ok" : problem);
    failed = !problem.empty();
  } else {
    put(key(fmt::format("rank{}", rank())), report.dump());
    failed = report.contains("error");
  }
}

// Keeps the newest keep_last and the keep_best with the lowest validation loss.
void CheckpointWriter::Impl::prune() {
  if (options.keep_last <= 0) return;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(options.folder)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with("step-") && !name.ends_with(".tmp")) names.push_back(name);
  }
  std::sort(names.rbegin(), names.rend());
  std::vector<std::pair<double, std::string>> by_loss;
  for (const auto& name : names) {
    try {
      const auto path = options.folder / name / "manifest.json";
      const auto manifest = Manifest::parse(read_file(path), path);
      if (manifest.validation_loss) by_loss.emplace_back(*manifest.validation_loss, name);
    } catch (const Error& error) {
      log_warning("[checkpoint.prune] {} is left alone: {}", name, error.what());
      return;
    }
  }
  std::sort(by_loss.begin(), by_loss.end());
  for (size_t i = static_cast<size_t>(options.keep_last); i < names.size(); ++i) {
    const auto end = by_loss.begin() + std::min<std::ptrdiff_t>(options.keep_best, std::ssize(by_loss));
    if (std::any_of(by_loss.begin(), end, [&](const auto& best) { return best.second == names[i]; })) continue;
    std::filesystem::remove_all(options.folder / names[i]);
  }
}

void CheckpointWriter::Impl::join_and_check() {
  if (!under_way) return;
  under_way = false;
  if (thread.joinable()) thread.join();
  failed = false;
  const auto verdict = await(key("verdict"));
  TESSERA_CHECK(verdict == "ok", ErrorKind::kIo, "[checkpoint.save] {}: not saved: {}. Earlier checkpoints are untouched.",
                options.folder.string(), verdict);
}

CheckpointWriter::CheckpointWriter(CheckpointOptions options) : impl_(std::make_unique<Impl>()) {
  impl_->options = std::move(options);
  impl_->serial = impl_->options.world->store().add(fmt::format("checkpoint/writers/{}", impl_->rank()), 1);
}

CheckpointWriter::~CheckpointWriter() {
  if (impl_->thread.joinable()) impl_->thread.join();
}

void CheckpointWriter::save(int64_t step, const NamedTensors& tensors, const nlohmann::json& extra,
                            std::optional<double> validation_loss) {
  impl_->join_and_check();
  ++impl_->saves;
  const auto staged = impl_->options.folder / (step_name(step) + ".tmp");
  std::string problem;
  if (impl_->rank() == 0) {
    std::error_code failed;
    std::filesystem::remove_all(staged, failed);
    std::filesystem::create_directories(staged, failed);
    if (failed) problem = fmt::format("{} cannot be made: {}", staged.string(), failed.message());
    impl_->put(impl_->key("folder"), problem);
  } else {
    problem = impl_->await(impl_->key("folder"));
  }
  TESSERA_CHECK(problem.empty(), ErrorKind::kIo, "[checkpoint.save] {}", problem);
  Manifest manifest;
  manifest.step = step;
  manifest.world_size = impl_->size();
  manifest.validation_loss = validation_loss;
  manifest.extra = extra;
  impl_->under_way = true;
  impl_->thread = std::thread([this, share = take_share(tensors, impl_->rank()), manifest = std::move(manifest)]() mutable {
    try {
      impl_->run(share, std::move(manifest));
    } catch (const std::exception& error) {  // only the store can fail here: the peers time out and say so
      log_error("[checkpoint.save] {}", error.what());
    }
  });
  if (!impl_->options.async) impl_->join_and_check();
}

void CheckpointWriter::finish() { impl_->join_and_check(); }

bool CheckpointWriter::failed() const { return impl_->failed; }

}  // namespace tessera
