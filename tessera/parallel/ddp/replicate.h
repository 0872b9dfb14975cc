// Replicated data parallelism (DDP): every rank holds all parameters, gradients are averaged while backward runs.
//
//   replicate(*model, {.mesh = dp});
//   auto loss = (*model)(batch);       // the first forward is COLLECTIVE over the mesh: ranks start from rank 0's
//   values loss.backward();                   // COLLECTIVE over the mesh; grad() is the mean over its ranks
//
// Semantics of torch.nn.parallel.DistributedDataParallel. Gradients travel in buckets of about `bucket_bytes`, the
// first of them small, in the reverse order of use; a bucket's all-reduce starts as soon as it and all before it are
// complete. Parameters stay what they are: plain tensors, or DTensors of another mesh (tensor parallelism), whose local
// parts are then replicated over this one. grad() is a view of a bucket. NoSync and set_requires_gradient_sync
// (gradient_sync.h) accumulate without communication. The module keeps its state; it belongs to one rank.
#pragma once

#include <cstdint>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/parallel/data_parallel/gradient_sync.h"
#include "tessera/parallel/data_parallel/mixed_precision.h"

namespace tessera {

struct ReplicateOptions {
  MeshPtr mesh = {};  // 1-d
  MixedPrecisionPolicy mp_policy = {};
  int64_t bucket_bytes = 25 << 20;
  int64_t first_bucket_bytes = 1 << 20;
  // Parameters that a forward does not use are always allowed: a rank's missing gradient counts as zero, and where no
  // rank has one, grad() stays as it was. Their bucket and those behind it then wait for the end of backward, unless
  // find_unused_parameters looks for them in the graph of each forward, or static_graph learns them from one backward.
  bool find_unused_parameters = false;
  // Every step runs the same graph. Also needed where one backward reaches a parameter several times (reentrant
  // checkpoints): learns how often.
  bool static_graph = false;
  bool init_sync = true;          // the first forward copies parameters and buffers of the mesh's first rank to all
  bool broadcast_buffers = true;  // as does each later one with gradients and synchronisation, for buffers
  // The first backward finds out in which order gradients arrive, and buckets follow it from then on. false: buckets
  // always follow the reverse order of registration, so that a resumed run sums in the same order as one that went on.
  bool learn_order = true;
  // With a param_dtype: parameters in it are kept between forwards, and written again where they lie, for graphs of
  // modules' kernels (layer_graphs.h).
  bool fixed_places = false;
};

// Makes `module` a replica. Parameters may be on the meta device until the first forward. No communication.
// Errors kShape: no 1-d mesh, a module at, below or above which fully_shard or replicate was called; in the first
// forward: parameters that differ between ranks in name, shape or dtype.
void replicate(nn::Module& module, const ReplicateOptions& options);

struct ReplicateStats {
  int64_t buckets = 0;
  int64_t all_reduces = 0;  // of gradients, since reset
  int64_t overlapped = 0;   // of those, started before the end of backward
};
ReplicateStats replicate_stats(nn::Module& module);
void reset_replicate_stats(nn::Module& module);

}  // namespace tessera
