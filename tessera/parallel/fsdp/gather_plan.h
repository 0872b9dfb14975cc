// How the shards of a group become its whole parameters: chosen once, when the group is made.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/parallel/data_parallel/flat_layout.h"
#include "tessera/parallel/data_parallel/mixed_precision.h"
#include "tessera/parallel/fsdp/sharded_param.h"
#include "tessera/parallel/fsdp/whole_storage.h"

namespace tessera {

enum class GatherWay {
  kAlias,    // one rank that computes as and where it stores: forward reads the shards themselves
  kInPlace,  // one parameter, or one rank that casts or keeps shards on the host: what is gathered is laid out as the
             // whole parameters are
  kCompact,  // one parameter (an embedding) is nearly all of the group: gathered into the storage of the whole
             // parameters and moved together there, the others behind it; saves a buffer of the group's size. CPU only
  kUnpack,   // gathered into a buffer of its own, then copied parameter by parameter
};

struct GatherPlan {
  GatherWay way;
  FlatLayout layout;                   // of what is gathered
  std::vector<int64_t> whole_offsets;  // of the parameters, bytes in the storage of whole parameters
  int64_t whole_bytes = 0;             // of that storage

  bool gathers_into_whole() const { return way == GatherWay::kInPlace || way == GatherWay::kCompact; }
};

// Sets the gather_dtype of `params`, and puts the largest of them first where that is the one to compact.
// shards_on_host: not on the mesh's device.
GatherPlan plan_gather(std::vector<ShardedParam>& params, const DeviceMesh& mesh, const MixedPrecisionPolicy& policy,
                       bool shards_on_host = false);

// Lays out what was gathered, for the ways that have something left to do: `whole` is filled, and with kCompact
// `gathered` lies in it.
void lay_out(const GatherPlan& plan, const at::TensorBase& gathered, const WholeStorage& whole, BufferPool& pool);

}  // namespace tessera
