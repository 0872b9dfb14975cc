// Fused operations with derivatives and sharding rules, and log-probabilities over a vocabulary that is sharded over
// ranks (NeMo RL: distributed/model_utils.py).
//
//   const at::Tensor loss = kernels::linear_cross_entropy(hidden, head, labels);
#pragma once

#include "tessera/dtensor.h"
#include "tessera/kernels/attention/causal_attention.h"
#include "tessera/kernels/attention/context_layout.h"
#include "tessera/kernels/linear/batch_invariant_linear.h"
#include "tessera/kernels/linear/grouped_linear.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/linear/quantized_weight.h"
#include "tessera/kernels/logprobs/context.h"
#include "tessera/kernels/logprobs/linear_logprobs.h"
#include "tessera/kernels/logprobs/logprobs.h"
#include "tessera/kernels/logprobs/next_token.h"
#include "tessera/kernels/logprobs/sampling.h"
#include "tessera/kernels/logprobs/vocab_topk.h"
#include "tessera/kernels/loss/linear_cross_entropy.h"
#include "tessera/kernels/rows/gated.h"
#include "tessera/kernels/rows/rms_norm.h"
#include "tessera/kernels/rows/rotary.h"
