// The dtypes in which a data-parallel model computes and reduces gradients. Semantics of FSDP2's MixedPrecisionPolicy.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace tessera {

struct MixedPrecisionPolicy {
  std::optional<c10::ScalarType> param_dtype = {};  // of unsharded (or copied) parameters, for compute; none: as stored
  std::optional<c10::ScalarType> reduce_dtype = {};  // of gradient reductions; none: as the gradient
  std::optional<c10::ScalarType> output_dtype = {};  // floating outputs of forward are cast to it; none: no cast
  bool cast_forward_inputs = true;                   // casts floating inputs of forward to param_dtype
};

}  // namespace tessera
