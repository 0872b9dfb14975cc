#include "tessera/models/gguf/gguf_weights.h"

#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include <map>
#include <span>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/gguf/gguf.h"
#include "tessera/formats/tensor_files/finite.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tessera/models/config/family.h"
#include "tessera/models/gguf/gguf_convert.h"
#include "tessera/models/gguf/gguf_tensors.h"
#include "tessera/models/tensors/model_parameters.h"
#include "tessera/nn/linear/quantized_linear.h"

namespace tessera {
namespace {

// A GGUF file whose tensors are found by the names of the model's parameters.
class GgufWeights {
 public:
  GgufWeights(const CausalLM& model, const std::filesystem::path& path) : file_(GgufFile::open(path)) {
    const auto& config = model.config();
    const auto& map = family_of(config.architecture).gguf;
    const auto found = file_->find_string("general.architecture").value_or("none");
    TESSERA_CHECK(
        !map.architecture.empty() && found == map.architecture, ErrorKind::kConfig,
        "[models.load] {}: found a model of the architecture {}, but config.json has {}. Set model.path to the "
        "folder of the same model.",
        path.string(), quote(found), config.architecture);
    for (auto& tensor : gguf_tensors(map, config)) {
      TESSERA_CHECK(
          tensor.stacks == nullptr, ErrorKind::kConfig,
          "[models.load] {}: {} holds stacked experts, which this version reads from folders only. Convert the "
          "file with 'tessera ckpt convert --to hf'.",
          path.string(), tensor.gguf_name);
      check_shape(tensor);
      tensors_.emplace(tensor.hf_name, std::move(tensor));
    }
    check_known();
  }
  const GgufTensor& tensor_for(const std::vector<std::string>& names) const {
    for (const auto& name : names) {
      if (const auto found = tensors_.find(name); found != tensors_.end()) return found->second;
    }
    raise(ErrorKind::kFormat, "[models.load] {}: holds no tensor for {}. List the file with 'tessera ckpt ls PATH'.",
          file_->path().string(), names.front());
  }
  at::Tensor values(const GgufTensor& tensor) const { return from_gguf(tensor, file_->tensor(tensor.gguf_name)); }
  // Checks `loaded`, which was made from the values of `tensor`. Error kFormat when `loaded` has values that are not
  // finite.
  void check_loaded(const GgufTensor& tensor, const at::Tensor& loaded) const {
    if (!find_non_finite(loaded)) return;
    const auto stored = file_->tensor(tensor.gguf_name);
    check_converted(stored, stored.to(loaded.scalar_type()), tensor.gguf_name,
                    "[models.load] " + file_->path().string());
  }
  // Returns the quantized blocks of a tensor, without decoding them. Each row consists of whole blocks, so from_gguf()
  // can reorder the rows of a quantized tensor.
  kernels::QuantizedWeight blocks(const GgufTensor& tensor) const {
    const auto rows = from_gguf(tensor, file_->packed_rows(tensor.gguf_name)).clone();
    const auto type = file_->tensor_info(tensor.gguf_name).type;
    if (!has_finite_values(type, std::as_bytes(std::span(rows.const_data_ptr<uint8_t>(), rows.nbytes())))) {
      check_loaded(tensor, file_->tensor(tensor.gguf_name));
    }
    return kernels::QuantizedWeight::gguf(type, rows, tensor.shape.at(1));
  }

 private:
  void check_shape(const GgufTensor& tensor) const {
    const auto& info = file_->tensor_info(tensor.gguf_name);
    TESSERA_CHECK(info.shape == tensor.shape, ErrorKind::kShape,
                  "[models.load] {}: {}: saved [{}], config.json wants [{}]", file_->path().string(), tensor.gguf_name,
                  fmt::join(info.shape, ", "), fmt::join(tensor.shape, ", "));
  }
  void check_known() const {
    std::set<std::string_view> known = {"rope_freqs.weight"};
    for (const auto& [name, tensor] : tensors_) known.insert(tensor.gguf_name);
    for (const auto& [name, info] : file_->tensors()) {
      TESSERA_CHECK(known.contains(name), ErrorKind::kFormat,
                    "[models.load] {}: tensor {} does not belong to the model of config.json", file_->path().string(),
                    quote(name));
      const auto* const type = ggml_type_info(static_cast<uint32_t>(info.type));
      TESSERA_CHECK(
          type->decodes, ErrorKind::kFormat,
          "[models.load] {}: tensor {} is {}, which cannot be decoded. Requantise the file with llama.cpp, for "
          "example to Q4_K.",
          file_->path().string(), quote(name), type->name);
    }
  }
  std::shared_ptr<const GgufFile> file_;
  std::map<std::string, GgufTensor> tensors_;  // by their names in folders
};

// Returns the view of the unsharded tensor `whole` at `box`, the box of this rank's shard.
at::Tensor local_part_of(const at::Tensor& whole, const LocalBox& box) {
  at::Tensor part = whole;
  for (size_t dim = 0; dim < box.shape.size(); ++dim) {
    part = part.narrow(static_cast<int64_t>(dim), box.shape[dim] == 0 ? 0 : box.offset[dim], box.shape[dim]);
  }
  return part;
}

}  // namespace

std::filesystem::path gguf_of(const std::filesystem::path& path) {
  if (path.extension() == ".gguf") return path;
  const auto linked = path / kLinkedGguf;
  // If a folder has both weights and a link to a GGUF file, the weights have priority.
  return std::filesystem::is_symlink(linked) && !TensorFiles::has_tensors(path) ? linked : std::filesystem::path();
}

void check_gguf(CausalLM& model, const std::filesystem::path& path) {
  const GgufWeights weights(model, path);
  for (const auto& parameter : shared_parameters(model)) weights.tensor_for(parameter.names);
  for (const auto& [name, packed] : nn::packed_weights(model)) weights.tensor_for({name});
}

void load_gguf(CausalLM& model, const std::filesystem::path& path, c10::Device device) {
  const at::NoGradGuard no_grad;
  check_gguf(model, path);
  const GgufWeights weights(model, path);
  // check_gguf finds every missing tensor and wrong shape before the first parameter is written.
  int64_t tensors = 0, packed_bytes = 0;
  for (auto& parameter : shared_parameters(model)) {
    const auto box = local_shard_box(parameter.tensor);
    const auto local = writable_local_shard(parameter, device);
    ++tensors;
    if (local.numel() == 0) continue;
    const auto& tensor = weights.tensor_for(parameter.names);
    local.copy_(local_part_of(weights.values(tensor), box));
    weights.check_loaded(tensor, local);
  }
  for (const auto& [name, packed] : nn::packed_weights(model)) {
    const auto& tensor = weights.tensor_for({name});
    ++tensors;
    if (packed->quantize_options.format == nn::Quantization::kGguf) {
      packed->set_weight(weights.blocks(tensor));
    } else {
      const auto values = weights.values(tensor).to(at::kFloat);
      weights.check_loaded(tensor, values);
      packed->pack(values);
    }
    packed_bytes += packed->weight.size_bytes();
  }
  log_info("[models.load] {}: {} tensors, {:.1f} MiB of them kept packed", path.string(), tensors,
           static_cast<double>(packed_bytes) / (1 << 20));
}

}  // namespace tessera
