// Copies a model or optimizer under FSDP1 into the same model or optimizer under FSDP2 (fully_shard), and back. Nothing
// is written to disk, and at most one parameter is whole at a time. Ranges of flat parameters and rows of DTensors are
// sent from rank to rank. Parameters whose shards are other boxes (tensor parallelism), or whose storage order differs,
// are all-gathered one by one.
//
//   copy_fsdp1_to_fsdp2(*flat_model, *model);
//   copy_fsdp1_to_fsdp2(*flat_model, *flat_optimizer, *optimizer);
//
// Both models consist of the same modules over the same ranks. Each function is COLLECTIVE over these ranks. Errors
// kShape, on all ranks and before anything is changed: parameters, buffers or states with a name or shape that only one
// side has.
#pragma once

#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"

namespace tessera {

void copy_fsdp1_to_fsdp2(nn::Module& fsdp1, nn::Module& fsdp2);
void copy_fsdp2_to_fsdp1(nn::Module& fsdp2, nn::Module& fsdp1);

// Copy the states, step counts and learning rate of `from` to the optimizer `to`; other hyper-parameters of `to` stay.
// An FSDP1 optimizer of flat parameters has one step count per FSDP1 unit, so in the copy to FSDP1 all parameters of a
// unit must have the same step count.
void copy_fsdp1_to_fsdp2(nn::Module& fsdp1, const optim::Optimizer& from, optim::Optimizer& to);
void copy_fsdp2_to_fsdp1(const optim::Optimizer& from, nn::Module& fsdp1, optim::Optimizer& to);

}  // namespace tessera
