// State dicts that do not depend on how a model is parallelized, and checkpoints that a run resumes from with any
// number of ranks.
// PyTorch: torch.distributed.checkpoint.
//
//   const auto [weights, states] = get_state_dict(*model, {optimizer.get()});
//   set_model_state_dict(*model, whole, {.full_state_dict = true, .broadcast_from_rank0 = true});
#pragma once

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/write_dcp.h"
#include "tessera/optim.h"
#include "tessera/state/broadcast_state_dict.h"
#include "tessera/state/cpu_state_dict.h"
#include "tessera/state/gather_state_dict.h"
#include "tessera/state/optimizer_dict.h"
#include "tessera/state/optimizer_forms.h"
#include "tessera/state/sharded_tensor.h"
#include "tessera/state/state_dict.h"
#include "tessera/state/state_dict_structure.h"
#include "tessera/state/state_value.h"
