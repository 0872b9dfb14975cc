#include "tessera/checkpoint/share.h"

#include <ATen/core/grad_mode.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/safetensors_writer.h"

namespace tessera {
namespace {

bool first_replica(const at::Tensor& tensor) {
  const auto& coordinate = device_mesh(tensor)->coordinate();
  if (!coordinate) return false;
  for (size_t dim = 0; dim < placements(tensor).size(); ++dim) {
    if (placements(tensor)[dim].is_replicate() && (*coordinate)[dim] != 0) return false;
  }
  return true;
}

void write_tensors(const std::filesystem::path& path, const NamedTensors& tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  SafetensorsWriter writer(path, std::move(specs));
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.finish();
}

}  // namespace

void check_placements(const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (!is_dtensor(tensor)) continue;
    for (const auto& placement : placements(tensor)) {
      TESSERA_CHECK(
          placement.is_shard() || placement.is_replicate(), ErrorKind::kShape,
          "[checkpoint.save] {}: placements {}; only Shard and Replicate can be saved. Redistribute it first.", name,
          to_string(placements(tensor)));
    }
  }
}

Share take_share(const NamedTensors& tensors, int rank) {
  const at::NoGradGuard no_grad;
  Share share;
  for (const auto& [name, tensor] : tensors) {
    ManifestPart part;
    at::Tensor local;
    if (is_dtensor(tensor)) {
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

nlohmann::json write_share(const Share& share, const std::filesystem::path& staged, int rank, int size) {
  const auto name = fmt::format("rank-{:05}-of-{:05}.safetensors", rank, size);
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
}

void add_report(Manifest& manifest, const nlohmann::json& report) {
  manifest.files.push_back({report.at("file"), report.at("bytes"), report.at("xxh3")});
  for (const auto& each : report.at("tensors")) {
    auto& tensor = manifest.tensors[each.at("name")];
    tensor.dtype = static_cast<c10::ScalarType>(each.at("dtype").get<int>());
    tensor.shape = each.at("shape").get<std::vector<int64_t>>();
    const auto& part = each.at("part");
    tensor.parts.push_back(
        {part.at("file"), part.at("offset").get<std::vector<int64_t>>(), part.at("shape").get<std::vector<int64_t>>()});
  }
}

}  // namespace tessera
