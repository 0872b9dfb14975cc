// Tensor, sequence, context, expert and pipeline parallelism of models, and activation checkpointing.
// PyTorch: torch.distributed.tensor.parallel and torch.distributed.pipelining.
//
//   parallelize_module(model, mesh, {{"up", std::make_shared<ColwiseParallel>()}, {"down",
//   std::make_shared<RowwiseParallel>()}});
#pragma once

#include "tessera/fsdp.h"
#include "tessera/models.h"
#include "tessera/parallel/context_parallel/apply_context_parallel.h"
#include "tessera/parallel/context_parallel/context_parallel.h"
#include "tessera/parallel/data_parallel.h"
#include "tessera/parallel/experts/expert_parallel.h"
#include "tessera/parallel/layers/activation_checkpoint.h"
#include "tessera/parallel/layers/layer_graphs.h"
#include "tessera/parallel/modules/distribute_module.h"
#include "tessera/parallel/modules/module_trace.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/parallel/pipeline/pipeline.h"
#include "tessera/parallel/tensor_parallel/model_plans.h"
#include "tessera/parallel/tensor_parallel/parallelize_module.h"
