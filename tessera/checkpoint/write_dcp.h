// Writes any checkpoint as a folder of torch.distributed.checkpoint (DCP), in one process.
//
//   write_dcp(*TensorFiles::open("smollm2"), "out", {.ranks = 4, .prefix = "model."});
//   reshard("runs/a/checkpoints/step-00000050", "out", 8);
//
// Tensors are split along dim 0 as by torch.chunk; chunk r goes into the file of rank r. One chunk at a time is in
// memory. The output folder must be absent or empty, and appears when it is complete. Errors kIo and kFormat. No
// communication.
#pragma once

#include <ATen/core/ATen_fwd.h>

#include <filesystem>
#include <functional>
#include <string>

#include "tessera/formats/tensor_files/tensor_files.h"

namespace tessera {

struct WriteDcpOptions {
  int ranks = 1;
  std::string prefix =
      {};  // put before every name; "model." gives the state dict that get_state_dict's model part is loaded from
  // Folder with config.json, tokenizer.json, ... that are copied next to the checkpoint. Empty: none are copied.
  std::filesystem::path companions = {};
  // Called for each tensor with its name and a chunk of its values, before that chunk is written. An exception of this
  // function ends the call.
  std::function<void(const std::string& name, const at::Tensor& values)> check = {};
};

void write_dcp(const TensorFiles& from, const std::filesystem::path& dir, const WriteDcpOptions& options = {});

// Writes a copy of the checkpoint `from` that is divided into the files of `ranks` ranks. All tensors and objects are
// copied. If there is a manifest, it is copied, and a run can resume from the copy (checkpoint.resume); otherwise the
// config and tokenizer files of the model are copied. Before anything is copied, Checkpoint::verify() checks the
// source: Error kFormat for damaged data.
void reshard(const std::filesystem::path& from, const std::filesystem::path& dir, int ranks);

}  // namespace tessera
