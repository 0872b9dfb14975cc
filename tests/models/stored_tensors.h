// The tensors of a model folder as values, which a test can change and write again.
//
//   auto tensors = stored_tensors(folder / "m");
//   tensors.erase("lm_head.weight");
//   store_tensors(folder / "m", tensors);
#pragma once

#include <ATen/ATen.h>

#include <filesystem>
#include <map>
#include <string>

#include "tessera/formats/safetensors/safetensors_folder.h"

namespace tessera::testing {

// The tensors are copies, so they outlive the file.
inline std::map<std::string, at::Tensor> stored_tensors(const std::filesystem::path& dir) {
  std::map<std::string, at::Tensor> tensors;
  const auto saved = SafetensorsFolder::open(dir);
  for (const auto& [name, file] : saved.files()) tensors[name] = file->tensor(name).clone();
  return tensors;
}

// Replaces the folder's model.safetensors, if there is one.
inline void store_tensors(const std::filesystem::path& dir, const std::map<std::string, at::Tensor>& tensors) {
  std::vector<SafetensorsSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  std::filesystem::remove(dir / "model.safetensors");
  SafetensorsFolderWriter writer(dir, specs);
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor.contiguous());
  writer.finish();
}

}  // namespace tessera::testing
