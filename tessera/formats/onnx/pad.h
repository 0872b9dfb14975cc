// aten::pad as operators of ONNX opset 11 and later.
//
//   onnx::Graph graph;
//   auto x = graph.input("x", {at::kFloat, {1, 3, 4}});
//   graph.output(onnx::pad(graph, x, {1, 2}, "reflect"), "y");
//
// torch's order of pads: (begin, end) of the last dim, then of the one before it; negative ones crop. What at::pad
// refuses is an error here as far as sizes are known: kShape for pads that do not fit the input, kConfig for the mode,
// the value and the dtype. Modes and what they become (docs/format/onnx.md):
//
//   constant    Pad(x, pads, value)                 any rank
//   reflect     Pad, mode reflect                   the last 1 to 3 dims of rank 2 to 5, as at::pad
//   replicate   Pad, mode edge                      the same
//   circular    Slice and Concat, dim after dim     the same
//
// Where a reflect or replicate pad is negative, what it crops is sliced off after padding, since runtimes differ in
// which of the two comes first. No communication.
#pragma once

#include <c10/core/Scalar.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/formats/onnx/graph.h"

namespace tessera::onnx {

// Pads that are known: they become constants. value: of constant pads, converted to the input's dtype; none is 0.
// circular pads of a size that is not a number are checked when the model runs: too large a pad is an error there.
Value pad(Graph& graph, Value input, const std::vector<int64_t>& pads, std::string_view mode = "constant",
          std::optional<c10::Scalar> value = {});

// Pads that the model computes or is given: int64 or int32, 1-d. An initializer is taken as known pads. Their number
// may be unknown, too; an odd one, or one above twice the rank, is an error when the model runs. Error kConfig for
// circular, whose nodes depend on the pads.
Value pad(Graph& graph, Value input, Value pads, std::string_view mode = "constant",
          std::optional<c10::Scalar> value = {});

// f(1, 2, 3, 4) of rank 4 = 0, 0, 3, 1, 0, 0, 4, 2: torch's pads in ONNX's order, begins of all dims, then ends.
// pads has an even number of elements, at most twice the rank.
std::vector<int64_t> onnx_pads(int64_t rank, const std::vector<int64_t>& pads);

}  // namespace tessera::onnx
