// FSDP1: flat parameters, their training and their state dicts. New programs use fsdp.h.
// PyTorch: torch.distributed.fsdp.FullyShardedDataParallel.
//
//   wrap_fsdp1(*model, {.group = mesh->group("dp")});
//   const StateDict states = optim_state_dict(*model, *optimizer);
#pragma once

#include "tessera/fsdp1/fully_sharded_data_parallel.h"
#include "tessera/fsdp1/state/convert_fsdp.h"
#include "tessera/fsdp1/state/legacy_optim_state_dict.h"
#include "tessera/fsdp1/state/model_state_dict.h"
#include "tessera/fsdp1/state/optim_state_dict.h"
#include "tessera/fsdp1/state/state_dict_type.h"
#include "tessera/fsdp1/state/verify_osd_by_load.h"
#include "tessera/state.h"
