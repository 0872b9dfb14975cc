// Optimizers, learning rate schedules, gradient norms and clipping. PyTorch: torch.optim and torch.nn.utils.
//
//   const auto optimizer = optim::make_adamw(model, {.lr = 3e-4});
//   optim::clip_grad_norm(model.parameters(), 1.0);
//   optimizer->step();
#pragma once

#include "tessera/nn.h"
#include "tessera/optim/expert_parameters.h"
#include "tessera/optim/grad_norm.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/schedule.h"
