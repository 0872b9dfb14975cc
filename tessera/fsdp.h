// Data parallelism of any module: fully_shard (FSDP2, HSDP) and replicate (DDP).
// PyTorch: torch.distributed.fsdp.fully_shard and torch.distributed._composable.replicate.
//
//   for (const auto& [name, block] : blocks.named_children()) fully_shard(*block, {.mesh = mesh});
//   fully_shard(model, {.mesh = mesh});
#pragma once

#include "tessera/nn.h"
#include "tessera/parallel/data_parallel/gradient_sync.h"
#include "tessera/parallel/data_parallel/mixed_precision.h"
#include "tessera/parallel/ddp/replicate.h"
#include "tessera/parallel/fsdp/fully_shard.h"
