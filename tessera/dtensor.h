// Public header of distributed tensors: DeviceMesh, placements, redistribution, and sharding rules for a user's own
// operations. It corresponds to torch.distributed.device_mesh and torch.distributed.tensor of PyTorch.
//
//   const auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"dp", "tp"});
//   const at::Tensor weight = distribute_tensor(values, mesh, {Replicate(), Shard(0)});
#pragma once

#include "tessera/comm.h"
#include "tessera/dtensor/debug/comm_debug.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/functional.h"
#include "tessera/dtensor/local_map.h"
#include "tessera/dtensor/random/random.h"
#include "tessera/dtensor/redistribute/redistribution_log.h"
#include "tessera/dtensor/rules/reductions/loss_parallel.h"
#include "tessera/dtensor/rules/register_sharding.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/dtensor/tensor/placement.h"
#include "tessera/mesh/device_mesh.h"
