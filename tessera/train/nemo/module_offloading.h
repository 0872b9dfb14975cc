// Moves a model to the accelerator while it is in use, and back to CPU memory afterwards. Semantics of NeMo AutoModel's
// move_to_device and ScopedModuleOffloading.
//
//   {
//     ScopedModuleOffloading here(reference_model, /*enabled=*/true);
//     logprobs = score(reference_model, batch);
//   }                                                      // moved back to CPU memory, also after an exception
//
// Parameters, gradients and buffers move. Tensor handles to them stay valid, so optimizers need not be created again.
// Optimizer state does not move. Belongs to one rank. No communication.
#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <optional>

#include "tessera/nn/module.h"

namespace tessera::train {

// Moves buffers first, because sharding does not move them, then parameters with their gradients, and the packed
// weights of quantized linears. DTensors are not moved: their mesh must be on this kind of device already. When the
// model leaves an accelerator, the memory that its caching allocator keeps is freed. Error kShape, before anything
// moves: a DTensor whose mesh is on another kind of device, or a parameter without values (meta device).
void move_to_device(nn::Module& model, c10::Device device);

struct OffloadLocations {
  std::optional<c10::Device> device = {};  // device while the model is in use; none: the accelerator
  // Where the model is stored while it is not in use. Empty: in CPU memory. Else in a mapped file without a name in
  // this folder; such a file takes memory only for pages that are read and written.
  std::filesystem::path idle_folder = {};
};

class ScopedModuleOffloading {
 public:
  // Moves the model to its device. With `enabled` false the object never does anything. After an Error the model is
  // moved back as far as possible. Error kConfig when there is no accelerator and no device is given; else as
  // move_to_device(). `model` must outlive the object.
  explicit ScopedModuleOffloading(nn::Module& model, bool enabled = false, OffloadLocations locations = {});
  // Calls close(), which moves the model back unless close() was called before. An error of close() is logged and not
  // thrown.
  ~ScopedModuleOffloading();
  ScopedModuleOffloading(const ScopedModuleOffloading&) = delete;
  ScopedModuleOffloading& operator=(const ScopedModuleOffloading&) = delete;
  // Moves the model now to the place where it is stored while it is not in use (OffloadLocations::idle_folder), as the
  // destructor would do later. Error kIo for a file that cannot be written.
  void close();

 private:
  void move_back();

  nn::Module& model_;
  bool is_on_device_;
  OffloadLocations locations_;
};

}  // namespace tessera::train
