// What TensorFiles::open() chooses from.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "tessera/formats/tensor_files/tensor_files.h"

namespace tessera {

std::shared_ptr<const TensorFiles> open_safetensors(const std::filesystem::path& path);
// shard-00001-model-00001-of-00002.safetensors
bool is_shard_name(std::string_view name);
std::shared_ptr<const TensorFiles> open_safetensors_shards(const std::filesystem::path& folder);
std::shared_ptr<const TensorFiles> open_dcp(const std::filesystem::path& folder, const TensorFilesOptions& options);
std::shared_ptr<const TensorFiles> open_torch_save(const std::filesystem::path& path,
                                                   const TensorFilesOptions& options);

}  // namespace tessera
