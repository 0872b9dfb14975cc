// Replicated data parallelism (DDP): every rank holds all parameters, and gradients are averaged while backward runs.
//
//   replicate(*model, {.mesh = dp});
//   auto loss = (*model)(batch);  // the first forward is COLLECTIVE: it broadcasts the values of the mesh's first rank
//   loss.backward();              // COLLECTIVE over the mesh; grad() is the mean over its ranks
//
// Semantics of torch.nn.parallel.DistributedDataParallel. Gradients are all-reduced in buckets of about `bucket_bytes`,
// in the reverse order of use; the first bucket is small. The all-reduce of a bucket starts as soon as this bucket and
// all buckets before it are complete. A parameter stays a plain tensor, or a DTensor of another mesh (tensor
// parallelism) whose local tensor is replicated over this mesh. grad() is a view of a bucket. NoSync and
// set_requires_gradient_sync (gradient_sync.h) accumulate gradients without communication. The module owns its
// replication state. A module belongs to one rank.
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
  // Parameters that a forward does not use are always allowed. If only some ranks have a gradient for a parameter, zero
  // is added for the others; if no rank has one, grad() does not change. The bucket of an unused parameter, and all
  // buckets after it, are reduced only at the end of backward, unless find_unused_parameters searches the graph of each
  // forward for unused parameters, or static_graph records them in the first backward.
  bool find_unused_parameters = false;
  // Set this if the autograd graph is the same in every step. It is needed if one backward computes the gradient of a
  // parameter several times (reentrant checkpoints): the first step counts how many times.
  bool static_graph = false;
  bool init_sync = true;          // the first forward broadcasts parameters and buffers from the mesh's first rank
  bool broadcast_buffers = true;  // every later forward with gradients and synchronisation broadcasts the buffers
  // The first backward records the order in which gradients arrive, and the buckets are rebuilt in that order. false:
  // buckets always follow the reverse order of registration, so a resumed run sums gradients in the same order as an
  // uninterrupted run.
  bool rebuild_buckets = true;
  // With a param_dtype: the cast parameters stay allocated between forwards and are rewritten at the same addresses, as
  // CUDA graphs of the modules' kernels need (layer_graphs.h).
  bool fixed_addresses = false;
};

// Makes `module` a replica. Parameters may be on the meta device until the first forward. No communication. Errors
// kShape: a mesh that is missing or not 1-d, a bucket size that is not positive, fully_shard or replicate was called on
// this module or on a module below it. The first forward raises Error kShape for parameters whose name, shape, dtype or
// requires_grad differs between ranks.
void replicate(nn::Module& module, const ReplicateOptions& options);

struct ReplicateStats {
  int64_t buckets = 0;
  int64_t all_reduces = 0;  // all-reduces of gradient buckets since reset_replicate_stats
  int64_t overlapped = 0;   // all-reduces of these that started before the end of backward
};
// replicate_stats() returns the counts of `module`, and reset_replicate_stats() sets all_reduces and overlapped to 0.
// Both raise Error kShape when replicate() was not called on `module`.
ReplicateStats replicate_stats(nn::Module& module);
void reset_replicate_stats(nn::Module& module);

}  // namespace tessera
