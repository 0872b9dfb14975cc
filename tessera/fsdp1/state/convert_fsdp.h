// A model or optimizer under FSDP1 into the same one under FSDP2 (fully_shard), and back, with nothing written and no
// more than one parameter whole at a time: ranges of flat parameters and rows of DTensors are exchanged from rank to
// rank; only parameters that lie in other boxes (tensor parallelism) or in another storage order are gathered, one by
// one.
//
//   copy_fsdp1_to_fsdp2(*flat_model, *model);
//   copy_fsdp1_to_fsdp2(*flat_model, *flat_optimizer, *optimizer);
//
// Both models are made of the same modules, over the same ranks. Each function is COLLECTIVE over them. Errors kShape,
// on all ranks and before anything is changed: names or shapes of parameters, buffers or states that only one side has.
#pragma once

#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"

namespace tessera {

void copy_fsdp1_to_fsdp2(nn::Module& fsdp1, nn::Module& fsdp2);
void copy_fsdp2_to_fsdp1(nn::Module& fsdp2, nn::Module& fsdp1);

// States, steps and the learning rate; other settings are those that the optimizers were made with. An FSDP1 optimizer
// of flat parameters has one step a unit, so the parameters of each must have the same.
void copy_fsdp1_to_fsdp2(nn::Module& fsdp1, const optim::Optimizer& from, optim::Optimizer& to);
void copy_fsdp2_to_fsdp1(const optim::Optimizer& from, nn::Module& fsdp1, optim::Optimizer& to);

}  // namespace tessera
