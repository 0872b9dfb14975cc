// In which dtypes a data-parallel model computes and reduces its gradients. Semantics of FSDP2's MixedPrecisionPolicy.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace tessera {

struct MixedPrecisionPolicy {
  std::optional<c10::ScalarType> param_dtype = {};   // gather (or copy) parameters and compute in it; none: as stored
  std::optional<c10::ScalarType> reduce_dtype = {};  // reduce gradients in it; none: as the gradient
  std::optional<c10::ScalarType> output_dtype = {};  // cast floating outputs of forward
  bool cast_forward_inputs = true;
};

}  // namespace tessera
