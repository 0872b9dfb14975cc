// Models that are on the accelerator only while they work. Semantics of NeMo AutoModel's move_to_device and
// ScopedModuleOffloading.
//
//   {
//     ScopedModuleOffloading here(reference_model, /*enabled=*/true);
//     logprobs = score(reference_model, batch);
//   }                                                      // back in the CPU's memory, also after an exception
//
// Parameters, gradients and buffers move; handles to them stay valid, so optimizers need not be made again. Their own
// state does not move. Belongs to one rank. No communication.
#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <optional>

#include "tessera/nn/module.h"

namespace tessera::train {

// Buffers first, as sharding does not move them, then parameters and their gradients; memory that a caching allocator
// keeps is given back. Errors kShape, before anything moves: a DTensor whose mesh is on another kind of device, a
// parameter without values (meta).
void move_to_device(nn::Module& model, c10::Device device);

struct OffloadPlaces {
  std::optional<c10::Device> device = {};  // where the model works; none: the accelerator
  // Where it is at home: empty, in the CPU's memory, else in a mapped file without a name in this folder, which takes
  // memory only as far as it is read and written.
  std::filesystem::path home_folder = {};
};

class ScopedModuleOffloading {
 public:
  // Moves the model to its device; does nothing, now and later, unless enabled. After an Error the model is at home
  // again as far as that can be. Error kConfig when there is no accelerator and no device is named; else as
  // move_to_device.
  explicit ScopedModuleOffloading(nn::Module& model, bool enabled = false, OffloadPlaces places = {});
  // Moves it home; what fails there is logged.
  ~ScopedModuleOffloading();
  ScopedModuleOffloading(const ScopedModuleOffloading&) = delete;
  ScopedModuleOffloading& operator=(const ScopedModuleOffloading&) = delete;
  // Moves it home now, and throws what fails: Error kIo for a file that cannot be written.
  void close();

 private:
  void leave();

  nn::Module& model_;
  bool entered_;
  OffloadPlaces places_;
};

}  // namespace tessera::train
