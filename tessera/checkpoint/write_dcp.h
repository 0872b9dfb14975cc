// Any checkpoint as a folder of torch.distributed.checkpoint, in one process.
//
//   write_dcp(*TensorFiles::open("smollm2"), "out", {.ranks = 4, .prefix = "model."});
//   reshard("runs/a/checkpoints/step-00000050", "out", 8);
//
// Tensors are cut along dim 0 as torch.chunk cuts them, chunk r into the file of rank r; one chunk at a time is in
// memory. The folder must not exist, or be empty, and appears when it is complete. Error kIo and kFormat. No
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
  std::string prefix = {};  // of every name; "model." makes the state dict that get_state_dict's is loaded from
  // Files of this folder that are copied beside the checkpoint: config.json, tokenizer.json, ...
  std::filesystem::path companions = {};
  // Called with the name and a part of the values of each tensor before the part is written; what it throws ends the
  // call.
  std::function<void(const std::string& name, const at::Tensor& values)> check = {};
};

void write_dcp(const TensorFiles& from, const std::filesystem::path& dir, const WriteDcpOptions& options = {});

// The same checkpoint in the files of another number of ranks: every tensor and object, and what a run's manifest says
// beside them, so that the run goes on from it (checkpoint.resume), or the files of a model. Error kFormat for a source
// that is damaged, by its hashes where it has some.
void reshard(const std::filesystem::path& from, const std::filesystem::path& dir, int ranks);

}  // namespace tessera
