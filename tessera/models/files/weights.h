// Fills a model's parameters from a folder or at random, and saves them to a folder.
//
//   auto model = make_model(config, {.device = at::kMeta});
//   for (auto& block : model->blocks()) fully_shard(*block, {.mesh = mesh});
//   fully_shard(*model, {.mesh = mesh});
//   load_pretrained(*model, dir);                 // each rank reads only the bytes of its own shards
//   ...
//   save_pretrained(*model, "out", dir);          // COLLECTIVE over the parameters' meshes
//
// Parameters may be plain tensors, or DTensors that are sharded or replicated, on any device. load_pretrained and
// init_weights allocate parameters that are on the meta device: a DTensor on the device of its mesh, a plain tensor on
// `device`. Ranks that run as threads of one process must not share a model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/decoder/causal_lm.h"

namespace tessera {

// How to treat a folder that contains a whole model and an adapter_config.json. transformers applies the adapter when
// it loads such a folder; this library does not.
enum class FolderAdapter : uint8_t { kRefuse, kIgnore };
// Checks the folder of a model. Error kConfig if the folder has both config.json and adapter_config.json, because
// load_pretrained and conversions would give the model without its adapter.
void refuse_folder_adapter(const std::filesystem::path& dir);

// Fills every parameter from the files that TensorFiles reads: model.safetensors or its shards, a distributed
// checkpoint of a run or of PyTorch, or torch.save. Floating dtypes are converted to the parameter's dtype.
// - A tied head may be missing in the file. When it is there, its values must equal the embedding (kFormat).
// - Names are those of the family's weight map. Tensors that the model does not own (a vision tower), and tensors of
//   other pipeline stages, are ignored.
// - All missing tensors and wrong shapes are reported in one kFormat or kShape error before anything is changed.
//   Tensors that the model does not have are listed in one warning, as in transformers.
// Errors: kConfig for an adapter in the folder, unless it is ignored; kFormat for values that are not finite, in the
// file or in the parameter's dtype, with the name of the first such tensor. No communication.
void load_pretrained(CausalLM& model, const std::filesystem::path& dir,
                     c10::Device device = c10::Device(c10::DeviceType::CPU),
                     FolderAdapter adapter = FolderAdapter::kRefuse);

// How to treat tensors of a folder that the model does not have. kWarn: list them in a warning. kRefuse: throw kFormat,
// for conversions, which would lose these tensors.
enum class UnusedTensors : uint8_t { kWarn, kRefuse };

// Makes only the checks of load_pretrained. It reads headers, and the values of a tied head, and changes nothing.
void check_pretrained(CausalLM& model, const std::filesystem::path& dir, UnusedTensors unused = UnusedTensors::kWarn);

// Calls check_pretrained for the model that the folder's config.json describes and returns an empty string. If there is
// no such model, returns the reason, such as "it holds no config.json". Errors of ModelConfig::from_folder and
// check_pretrained.
std::string check_folder(const std::filesystem::path& dir);

// Initialises matrices with normal(0, initializer_range), norms with ones (zeros for norms that add one) and biases
// with zeros. The value of an element depends only on the seed, the parameter's name and the element's global index. No
// communication.
void init_weights(CausalLM& model, uint64_t seed, c10::Device device = c10::Device(c10::DeviceType::CPU));

struct SaveOptions {
  std::optional<c10::ScalarType> dtype = std::nullopt;  // nullopt: the parameters' dtype
  uint64_t max_shard_bytes = 5'000'000'000;
  // Merges adapters (adapters.h) into the weights that they adapt; otherwise only the base is saved.
  bool merge_adapters = false;
  // The pipeline-parallel mesh (1-d): its ranks together have all stages of the model (keep_stages of
  // parallel/pipeline). Null: this rank has the whole model. The first rank of the mesh writes.
  MeshPtr pipeline = {};
};
// Writes a folder that transformers loads: config.json with unknown keys kept, model.safetensors (in several files when
// larger than max_shard_bytes), and the files generation_config.json, tokenizer and chat template of source_dir, if
// they exist. Tensors of source_dir that the model does not own (a vision tower) are copied byte for byte. For families
// with such tensors, parameters get the names that they have in source_dir. The folder must not exist or must be empty,
// and appears only when it is complete. COLLECTIVE over the pipeline and the meshes of DTensor parameters: parameters
// are gathered one by one, and rank 0 of the mesh writes. An error of the writing rank is thrown on all ranks; kFormat
// for values that are not finite in the saved dtype.
void save_pretrained(CausalLM& model, const std::filesystem::path& dir, const std::filesystem::path& source_dir,
                     const SaveOptions& options = {});

// Calls make_model and load_pretrained. Without `dtype` the model has the dtype of config.json (float32 when it has
// none).
std::shared_ptr<CausalLM> from_pretrained(const std::filesystem::path& dir,
                                          std::optional<c10::ScalarType> dtype = std::nullopt,
                                          c10::Device device = c10::Device(c10::DeviceType::CPU),
                                          FolderAdapter adapter = FolderAdapter::kRefuse);

}  // namespace tessera
