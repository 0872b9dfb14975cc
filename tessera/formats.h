// Tensor files: safetensors, GGUF, torch.save and torch.distributed.checkpoint. For a single process; no communication.
//
//   const auto files = TensorFiles::open("model-folder");
#pragma once

#include "tessera/base/error.h"
#include "tessera/formats/gguf/gguf.h"
#include "tessera/formats/gguf/gguf_writer.h"
#include "tessera/formats/safetensors/safetensors.h"
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/formats/tensor_files/finite.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tessera/formats/torch/dcp_folder.h"
#include "tessera/formats/torch/pickler.h"
#include "tessera/formats/torch/torch_save.h"
#include "tessera/formats/torch/torch_save_writer.h"
