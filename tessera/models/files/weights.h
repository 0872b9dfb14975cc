// The values of a model's parameters: from a folder, at random, to a folder.
//
//   auto model = make_model(config, {.device = at::kMeta});
//   for (auto& block : model->blocks()) fully_shard(*block, {.mesh = mesh});
//   fully_shard(*model, {.mesh = mesh});
//   load_pretrained(*model, dir);                 // each rank reads its own byte ranges, nothing else
//   ...
//   save_pretrained(*model, "out", dir);          // COLLECTIVE over the parameters' meshes
//
// Parameters may be plain tensors or DTensors that are sharded or replicated, on any device; those on the meta device
// are allocated here (on `device`, or the device of their mesh). A model belongs to one rank.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/decoder/causal_lm.h"

namespace tessera {

// Of a folder that holds a whole model and adapter_config.json beside it, which transformers loads with the adapter.
enum class FolderAdapter : uint8_t { kRefuse, kIgnore };
// Error kConfig for such a folder: load_pretrained and conversions would give the model without its adapter.
void refuse_folder_adapter(const std::filesystem::path& dir);

// Fills every parameter from what TensorFiles reads (model.safetensors or its shards, a distributed checkpoint of a run
// or of PyTorch, torch.save), in the parameter's dtype: floating dtypes are converted. Tied heads need not be in the
// file; where they are, their values must be those of the embedding (kFormat). All that is missing or of another shape
// is found and reported in one kFormat or kShape error before anything is changed; tensors that the model has no place
// for are named in one warning, as in transformers. Names are those of the family's weight map; tensors that are
// foreign to the model (a vision tower) are left alone, as is what lies in other stages of a pipeline. Error kConfig
// for an adapter in the folder, unless it is to be ignored; kFormat for values that are not finite, in the file or in
// the parameter's dtype, with the name of the first tensor that has one. No communication.
void load_pretrained(CausalLM& model, const std::filesystem::path& dir,
                     c10::Device device = c10::Device(c10::DeviceType::CPU),
                     FolderAdapter adapter = FolderAdapter::kRefuse);

// Tensors of a folder that the model has no place for: named in a warning, or an error (kFormat) for a conversion that
// would lose them.
enum class UnusedTensors : uint8_t { kWarn, kRefuse };

// The checks of load_pretrained alone: reads headers, and the values of a tied head; changes nothing.
void check_pretrained(CausalLM& model, const std::filesystem::path& dir, UnusedTensors unused = UnusedTensors::kWarn);

// The same for the model that config.json in the folder describes, whose errors are ModelConfig::from_folder's. Returns
// nothing, or, where there is no model to compare with, why: "it holds no config.json".
std::string check_folder(const std::filesystem::path& dir);

// normal(0, initializer_range) for matrices, ones for norms (zeros where they add one), zeros for biases. An element's
// value depends on the seed, the parameter's name and its global index only. No communication.
void init_weights(CausalLM& model, uint64_t seed, c10::Device device = c10::Device(c10::DeviceType::CPU));

struct SaveOptions {
  std::optional<c10::ScalarType> dtype = std::nullopt;  // none: as the parameters are
  uint64_t max_shard_bytes = 5'000'000'000;
  // Adapters (adapters.h) are added to the weights that they adapt; else only the base is saved.
  bool merge_adapters = false;
  // 1-d, over the ranks whose stages make up the model (keep_stages of parallel/pipeline); null: it is whole. The first
  // of them writes.
  MeshPtr pipeline = {};
};
// Writes a folder that transformers loads: config.json with unknown keys kept, model.safetensors (in shards where
// larger than max_shard_bytes), and generation_config.json, tokenizer and chat template of source_dir where it has
// them. Tensors of source_dir that are foreign to the model are saved byte for byte, and parameters are called as
// there. The folder appears when it is complete; it must not exist before, or be empty. COLLECTIVE over the pipeline
// and the meshes of DTensor parameters: they are gathered one by one and rank 0 of the mesh writes. An error of the
// writing rank is thrown on all; kFormat for values that are not finite in the dtype that is saved.
void save_pretrained(CausalLM& model, const std::filesystem::path& dir, const std::filesystem::path& source_dir,
                     const SaveOptions& options = {});

// make_model and load_pretrained. dtype: none as in config.json (float32 where it says nothing).
std::shared_ptr<CausalLM> from_pretrained(const std::filesystem::path& dir,
                                          std::optional<c10::ScalarType> dtype = std::nullopt,
                                          c10::Device device = c10::Device(c10::DeviceType::CPU),
                                          FolderAdapter adapter = FolderAdapter::kRefuse);

}  // namespace tessera
