// Helpers of NVIDIA NeMo AutoModel and NeMo RL under their original names: gradient accumulation hooks, module
// offloading, tail padding, THD batches, gradients of experts and of tensor parallel replicas. docs/upstream.md lists
// these functions.
#pragma once

#include "tessera/data/nemo/thd.h"
#include "tessera/optim.h"
#include "tessera/optim/nemo/gradient_scaling.h"
#include "tessera/optim/nemo/tp_replicas.h"
#include "tessera/parallel.h"
#include "tessera/train/nemo/accumulation.h"
#include "tessera/train/nemo/module_offloading.h"
#include "tessera/train/nemo/tail_padding.h"
