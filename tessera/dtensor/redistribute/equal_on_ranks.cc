#include "tessera/dtensor/redistribute/equal_on_ranks.h"

#include <ATen/ATen.h>
#include <xxhash.h>

#include "tessera/comm/collectives/collectives.h"

namespace tessera {

namespace {

// A hash of the tensor's values, which is 0 or positive so that it can be negated. A tensor of zeros of any dtype and
// shape has the hash 0.
int64_t hash_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  if (tensor._is_zerotensor() || !at::any(tensor).item<bool>()) return 0;
  const at::Tensor values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  return static_cast<int64_t>(XXH3_64bits(values.const_data_ptr(), values.nbytes()) >> 2);
}

}  // namespace

// All-reduces the minimum of hash and of -hash, which gives the smallest hash and minus the largest hash. The tensors
// are equal if the smallest hash is the largest. One all-reduce for each mesh dim reduces over all ranks of the mesh.
bool is_equal_on_all_ranks(const at::TensorBase& tensor, const DeviceMesh& mesh, const std::string& cause) {
  if (tensor.is_meta()) return false;
  const int64_t hash = hash_of(at::Tensor(tensor));
  const at::Tensor bounds = at::tensor({hash, -hash}, at::kLong).to(mesh.device());
  for (int64_t m = 0; m < mesh.ndim() && mesh.coordinate(); ++m) {
    if (mesh.shape()[m] > 1) comm::all_reduce(*mesh.group(m), bounds, comm::ReduceOp::kMin, cause).wait();
  }
  return bounds[0].item<int64_t>() == -bounds[1].item<int64_t>();
}

}  // namespace tessera
