// aten::pad as operators of ONNX opset 11 and later.
//
//   onnx::Graph graph;
//   auto x = graph.input("x", {at::kFloat, {1, 3, 4}});
//   graph.output(onnx::pad(graph, x, {1, 2}, "reflect"), "y");
//
// `pads` has torch's order: (begin, end) of the last dim, then of the dim before it; negative pads crop. Inputs that
// at::pad rejects are errors here as far as sizes are known: kShape for pads that do not fit the input, kConfig for an
// invalid mode, value or dtype. Modes and the nodes that they become (docs/format/onnx.md):
//
//   constant    Pad(x, pads, value)                 any rank
//   reflect     Pad, mode reflect                   the last 1 to 3 dims of rank 2 to 5, as at::pad
//   replicate   Pad, mode edge                      as reflect
//   circular    Slice and Concat, dim after dim     as reflect
//
// A negative reflect or replicate pad becomes a Slice after the Pad, because runtimes differ in whether they pad or
// crop first. No communication.
#pragma once

#include <c10/core/Scalar.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/formats/onnx/graph.h"

namespace tessera::onnx {

// Pads whose values are known when the graph is built: they become constants. `value` is for mode constant and is
// converted to the input's dtype; default 0. For a circular pad along a dim of unknown size, the exported model checks
// the pad when it runs: a pad that is too large is an error of that run.
Value pad(Graph& graph, Value input, const std::vector<int64_t>& pads, std::string_view mode = "constant",
          std::optional<c10::Scalar> value = {});

// Pads that the model computes or receives: int64 or int32, 1-d. If `pads` is an initializer, its values are used as
// known pads. The number of pads may be unknown, too; an odd number, or more than twice the rank, is an error when the
// model runs. Error kConfig for circular, because its nodes depend on the pads.
Value pad(Graph& graph, Value input, Value pads, std::string_view mode = "constant",
          std::optional<c10::Scalar> value = {});

// Converts torch's pads to ONNX's order: begins of all dims, then ends of all dims. Example for rank 4: pads 1, 2, 3, 4
// become 0, 0, 3, 1, 0, 0, 4, 2. `pads` has an even number of elements, at most twice the rank.
std::vector<int64_t> onnx_pads(int64_t rank, const std::vector<int64_t>& pads);

}  // namespace tessera::onnx
