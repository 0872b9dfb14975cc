#include "tessera/dtensor/local_map.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "tessera/base/error.h"

namespace tessera {

namespace {

std::string name_of(size_t i, const at::Tensor& tensor) {
  return fmt::format("{} of shape [{}]", i, fmt::join(tensor.sizes(), ", "));
}

// Returns the local tensor of DTensor input i. Redistributes the input to in_placements[i] if redistribute_inputs
// allows it. in_grad_placements[i] are the placements of the local tensor's gradient.
at::Tensor localize(size_t i, at::Tensor input, const LocalMapOptions& options) {
  if (options.in_placements) {
    const auto& wanted = (*options.in_placements)[i];
    TESSERA_CHECK(wanted.has_value(), ErrorKind::kShape,
                  "[dtensor.local_map] DTensor input {} expects placements but received None!", name_of(i, input));
    if (placements(input) != *wanted) {
      TESSERA_CHECK(
          options.redistribute_inputs, ErrorKind::kShape,
          "[dtensor.local_map] arg {} in local_map has a mismatched placements: arg placements is {} but the input "
          "placements is {}! If redistribute_inputs is wanted, set redistribute_inputs=True to local_map.",
          name_of(i, input), to_string(placements(input)), to_string(*wanted));
      input = redistribute(input, *wanted);
    }
  }
  if (!options.in_grad_placements) return to_local(input);
  const auto& back = options.in_grad_placements->at(i);
  TESSERA_CHECK(back.has_value(), ErrorKind::kShape,
                "[dtensor.local_map] DTensor input {} expects in grad placements but received None!",
                name_of(i, input));
  return to_local(input, back);
}

void check_lengths(const LocalMapOptions& options, size_t inputs) {
  for (const auto& [list, name] : {std::pair{&options.in_placements, "in_placements"},
                                   std::pair{&options.in_grad_placements, "in_grad_placements"}}) {
    TESSERA_CHECK(!*list || (*list)->size() == inputs, ErrorKind::kShape,
                  "[dtensor.local_map] {} length {} does not match the number of input args {}!", name, (*list)->size(),
                  inputs);
  }
}

// The messages and the order of the checks are those of torch.distributed.tensor's local_map. The mesh of the outputs
// is options.device_mesh, or by default the mesh of the first DTensor input. If no input is a DTensor, the outputs are
// returned unchanged and unchecked.
std::vector<at::Tensor> run(const TensorsFunction& function, const LocalMapOptions& options,
                            const std::vector<at::Tensor>& inputs) {
  check_lengths(options, inputs.size());
  MeshPtr mesh = options.device_mesh;
  bool any = false;
  std::vector<at::Tensor> locals;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (is_dtensor(inputs[i])) {
      any = true;
      mesh = mesh ? mesh : device_mesh(inputs[i]);
      locals.push_back(localize(i, inputs[i], options));
      continue;
    }
    TESSERA_CHECK(inputs[i].defined() || !options.in_placements || !(*options.in_placements)[i], ErrorKind::kShape,
                  "[dtensor.local_map] Non-Tensor input {} expects None placements but received {}!", i,
                  to_string((*options.in_placements)[i].value_or(Placements{})));
    locals.push_back(inputs[i]);
  }
  std::vector<at::Tensor> outputs = function(locals);
  if (!any) return outputs;
  TESSERA_CHECK(
      outputs.size() == options.out_placements.size(), ErrorKind::kShape,
      "[dtensor.local_map] local_map requires one PlacementType be provided for each output value, received {} "
      "out_placements but {} is expected!",
      options.out_placements.size(), outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& wanted = options.out_placements[i];
    TESSERA_CHECK(outputs[i].defined() || !wanted, ErrorKind::kShape,
                  "[dtensor.local_map] Non-tensor output {} expects None placements but received {}!", i,
                  to_string(wanted.value_or(Placements{})));
    if (wanted) {
      TESSERA_CHECK(!is_dtensor(outputs[i]), ErrorKind::kShape,
                    "[dtensor.local_map] output {}: found a DTensor, wanted a local tensor from the function.", i);
      outputs[i] = from_local(outputs[i], mesh, *wanted);
    }
  }
  return outputs;
}

}  // namespace

TensorsFunction local_map(TensorsFunction function, LocalMapOptions options) {
  return [function = std::move(function), options = std::move(options)](const std::vector<at::Tensor>& inputs) {
    return run(function, options, inputs);
  };
}

}  // namespace tessera
