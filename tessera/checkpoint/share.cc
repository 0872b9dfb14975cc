#include "tessera/checkpoint/share.h"

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/json.h"
#include "tessera/checkpoint/held_boxes.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/safetensors.h"
#include "tessera/formats/safetensors_writer.h"

namespace tessera {
namespace {

constexpr JsonLimits kReportLimits{.max_bytes = size_t{1} << 30, .max_depth = 8, .max_keys = 20'000'000};

// Whether no other rank writes this rank's part.
bool writes_part(const at::Tensor& tensor, int rank, int first_holder) {
  if (!is_dtensor(tensor)) return rank == first_holder;
  const auto& mesh = *device_mesh(tensor);
  const auto& ranks = mesh.ranks();
  if (!mesh.coordinate() || std::find(ranks.begin(), ranks.end(), first_holder) == ranks.end()) return false;
  for (size_t dim = 0; dim < placements(tensor).size(); ++dim) {
    if (placements(tensor)[dim].is_replicate() && (*mesh.coordinate())[dim] != 0) return false;
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
      TESSERA_CHECK(!placement.is_partial(), ErrorKind::kShape,
                    "[checkpoint.save] {}: placements {}; what is still to be reduced cannot be saved. Redistribute it "
                    "first.",
                    name, to_string(placements(tensor)));
    }
  }
}

Share take_share(const NamedTensors& tensors, int rank, int first_holder) {
  const at::NoGradGuard no_grad;
  Share share;
  for (const auto& [name, tensor] : tensors) {
    auto& origin = share.origins.emplace_back(Share::Origin{name, tensor.scalar_type(), tensor.sizes().vec()});
    if (!writes_part(tensor, rank, first_holder)) continue;
    const at::Tensor local = is_dtensor(tensor) ? to_local(tensor) : tensor;
    for (const auto& box : held_boxes(tensor)) {
      const bool at_start = std::all_of(box.at.begin(), box.at.end(), [](int64_t begin) { return begin == 0; });
      origin.parts.push_back(
          {.file = 0, .offset = box.offset, .shape = box.shape, .at = at_start ? std::vector<int64_t>() : box.at});
    }
    share.tensors.emplace_back(name, local.detach().to(at::kCPU, local.scalar_type(), false, true));
  }
  return share;
}

std::string write_share(const Share& share, const std::filesystem::path& staged, int rank, int size) {
  const auto name = fmt::format("rank-{:05}-of-{:05}.safetensors", rank, size);
  write_tensors(staged / name, share.tensors);
  nlohmann::json tensors = nlohmann::json::array();
  for (const auto& origin : share.origins) {
    nlohmann::json parts = nlohmann::json::array();
    for (const auto& part : origin.parts) parts.push_back(part_to_json(part));
    tensors.push_back({{"name", origin.name},
                       {"dtype", safetensors_dtype_name(origin.dtype)},
                       {"shape", origin.shape},
                       {"parts", std::move(parts)}});
  }
  const nlohmann::json report = {{"file", name},
                                 {"bytes", std::filesystem::file_size(staged / name)},
                                 {"xxh3", hash_file(staged / name)},
                                 {"tensors", std::move(tensors)}};
  return report.dump();
}

std::string failure_report(int rank, const std::exception& error) {
  const nlohmann::json report = {{"error", fmt::format("rank {}: {}", rank, error.what())}};
  return report.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void add_report(Manifest& manifest, const std::string& text) {
  const std::string where = fmt::format("report {}", manifest.files.size());
  const Json json = parse_json_object(text, where, kReportLimits);
  const JsonReader report(json, where);
  TESSERA_CHECK(!report.has("error"), ErrorKind::kIo, "{}", report.string("error"));
  const size_t file = manifest.files.size();
  manifest.files.push_back({report.string("file"), report.at("bytes").as_unsigned(), report.at("xxh3").as_unsigned()});
  for (const auto& each : report.at("tensors").items()) {
    const std::string name = each.string("name");
    const auto dtype = parse_safetensors_dtype(each.string("dtype"));
    const auto shape = each.integers("shape", 0, INT64_MAX);
    const auto [found, is_new] = manifest.tensors.try_emplace(name, ManifestTensor{dtype, shape, {}});
    auto& tensor = found->second;
    TESSERA_CHECK(tensor.dtype == dtype && tensor.shape == shape, ErrorKind::kShape,
                  "{}: {} [{}] on one rank, {} [{}] on another", name, c10::toString(tensor.dtype),
                  fmt::join(tensor.shape, ", "), c10::toString(dtype), fmt::join(shape, ", "));
    for (const auto& part : each.at("parts").items()) {
      tensor.parts.push_back(part_from_json(part.value()));
      tensor.parts.back().file = file;
    }
  }
}

}  // namespace tessera
