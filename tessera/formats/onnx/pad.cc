#include "tessera/formats/onnx/pad.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::onnx {
namespace {

constexpr int64_t kToEnd = std::numeric_limits<int64_t>::max();
constexpr int64_t kLargestPad = int64_t{1} << 48;  // sums with sizes stay within int64

enum class PadMode { kConstant, kReflect, kReplicate, kCircular };

// The arguments of one call of pad(), which the functions below share.
struct PadCall {
  Graph& graph;
  Value input;
  PadMode mode;
  std::string_view mode_name;

  const ValueType& type() const { return graph.type(input); }
  int64_t rank() const { return type().rank(); }
  std::string subject() const { return quote(graph.name(input)); }
};

PadMode parse_mode(const Graph& graph, Value input, std::string_view mode) {
  if (mode == "constant") return PadMode::kConstant;
  if (mode == "reflect") return PadMode::kReflect;
  if (mode == "replicate") return PadMode::kReplicate;
  if (mode == "circular") return PadMode::kCircular;
  const std::string producer = graph.producer_type(input);
  raise(ErrorKind::kConfig,
        "[onnx.pad] Unrecognized padding mode {}  [Caused by the value {} (type '{}') in the TorchScript graph. The "
        "containing node has kind '{}::{}'.] Use constant, reflect, replicate or circular.",
        escape(mode), quote(graph.name(input)), escape(graph.type(input).to_string()),
        producer == "Param" ? "prim" : "onnx", producer);
}

// Checks by the rules of at::pad that `count`, the number of pads, fits the input's number of dims and the padding
// mode. Error kShape.
void check_count(const PadCall& call, int64_t count) {
  const int64_t rank = call.rank();
  TESSERA_CHECK(count % 2 == 0, ErrorKind::kShape,
                "[onnx.pad] {}: found {} pads. Padding length must be divisible by 2.", call.subject(), count);
  TESSERA_CHECK(count <= 2 * rank, ErrorKind::kShape,
                "[onnx.pad] {}: found {} pads. Padding length should be less than or equal to two times the input "
                "dimension, which is {}.",
                call.subject(), count, rank);
  if (call.mode == PadMode::kConstant) return;
  const int64_t dims = count / 2;
  const bool fits = dims >= 1 && dims <= 3 && (rank == dims + 1 || rank == dims + 2);
  TESSERA_CHECK(fits, ErrorKind::kShape,
                "[onnx.pad] {}: Padding size {} is not supported for {}D input tensor in mode {}. Pad the last dim of "
                "2D or 3D, the last 2 of 3D or 4D, or the last 3 of 4D or 5D.",
                call.subject(), count, rank, call.mode_name);
}

// Returns the padding value as a 0-d tensor of the input's dtype; undefined for the modes without a padding value.
at::Tensor fill_value(const PadCall& call, const std::optional<c10::Scalar>& value) {
  if (call.mode != PadMode::kConstant) {
    TESSERA_CHECK(!value || value->equal(0), ErrorKind::kConfig,
                  "[onnx.pad] {}: Padding mode \"{}\" doesn't take in value argument", call.subject(), call.mode_name);
    return {};
  }
  const auto dtype = call.type().dtype;
  try {
    return at::full({}, value.value_or(0), dtype);
  } catch (const std::exception& error) {
    raise(ErrorKind::kConfig, "[onnx.pad] {}: the value cannot be a {}: {}", call.subject(), c10::toString(dtype),
          escape(error.what(), 300));
  }
}

void check_dtype(const PadCall& call) {
  const auto dtype = call.type().dtype;
  const bool late = dtype == at::kBool || dtype == at::kBFloat16 || c10::isComplexType(dtype);
  TESSERA_CHECK(!late || call.graph.opset() >= 13 || call.mode == PadMode::kCircular, ErrorKind::kConfig,
                "[onnx.pad] {}: Pad of opset {} takes no {}. Make the graph with opset 13, or cast the input.",
                call.subject(), call.graph.opset(), c10::toString(dtype));
}

PadCall checked_call(Graph& graph, Value input, std::string_view mode) {
  PadCall call{graph, input, parse_mode(graph, input, mode), mode};
  check_dtype(call);
  return call;
}

// The pads of each dim, in the order of the input's dims.
struct PadsByDim {
  std::vector<int64_t> begin, end;  // one for each dim of the input
};

PadsByDim pads_by_dim(int64_t rank, const std::vector<int64_t>& pads) {
  PadsByDim sides{std::vector<int64_t>(static_cast<size_t>(rank)), std::vector<int64_t>(static_cast<size_t>(rank))};
  for (size_t pair = 0; pair < pads.size() / 2; ++pair) {
    const size_t dim = static_cast<size_t>(rank) - 1 - pair;
    sides.begin[dim] = pads[2 * pair];
    sides.end[dim] = pads[2 * pair + 1];
  }
  return sides;
}

// Why at::pad would reject the pads of a dim of `size`, as a sentence; empty when they fit.
std::string pad_error(PadMode mode, int64_t size, int64_t begin, int64_t end) {
  const int64_t cropped = size + std::min<int64_t>(begin, 0) + std::min<int64_t>(end, 0);
  switch (mode) {
    case PadMode::kConstant:
      return cropped < 0 ? "negative pads crop more than there is" : "";
    case PadMode::kReflect:
      if (begin >= size || end >= size) return "Padding size should be less than the corresponding input dimension";
      return size + begin + end < 1 ? "nothing would be left" : "";
    case PadMode::kReplicate:
      if (size == 0) return "there is no edge to replicate";
      return size + begin + end < 1 ? "nothing would be left" : "";
    case PadMode::kCircular:
      if (cropped < 0) return "negative pads crop more than there is";
      return begin > cropped || end > cropped ? "Padding value causes wrapping around more than once" : "";
  }
  return "";
}

// Returns the size plus `by`. A size that is not a number becomes unknown unless `by` is 0.
Dim add_to_size(const Dim& size, int64_t by) {
  if (const auto* number = std::get_if<int64_t>(&size)) return *number + by;
  return by == 0 ? size : Dim{};
}

// The type of the result. Error kShape for pads that do not fit a dim of known size.
ValueType padded_type(const PadCall& call, const PadsByDim& sides) {
  ValueType out = call.type();
  for (size_t dim = 0; dim < out.shape.size(); ++dim) {
    const int64_t begin = sides.begin[dim], end = sides.end[dim];
    TESSERA_CHECK(std::max(std::abs(std::max(begin, -kToEnd)), std::abs(std::max(end, -kToEnd))) <= kLargestPad,
                  ErrorKind::kShape, "[onnx.pad] {}: found pads ({}, {}) of dim {}, wanted none beyond 2^48",
                  call.subject(), begin, end, dim);
    const bool kept = begin == 0 && end == 0;
    if (kept && call.mode == PadMode::kConstant) continue;
    if (const auto* size = std::get_if<int64_t>(&out.shape[dim])) {
      const std::string why = kept ? "" : pad_error(call.mode, *size, begin, end);
      TESSERA_CHECK(why.empty(), ErrorKind::kShape, "[onnx.pad] {}: mode {}, dim {} of size {}, pads ({}, {}): {}.",
                    call.subject(), call.mode_name, dim, *size, begin, end, why);
      out.shape[dim] = *size + begin + end;
    } else if (!kept) {
      out.shape[dim] = Dim{};
    }
  }
  return out;
}

// One Slice node over several axes. An end of kToEnd means the end of the axis.
Value slice(Graph& graph, Value input, const std::vector<int64_t>& starts, const std::vector<int64_t>& ends,
            const std::vector<int64_t>& axes, ValueType type) {
  const Value first = graph.constant(starts, "starts"), last = graph.constant(ends, "ends");
  return graph.node({.op_type = "Slice", .inputs = {input, first, last, graph.constant(axes, "axes")}},
                    std::move(type));
}

Value pad_node(const PadCall& call, Value pads, const at::Tensor& fill, ValueType type) {
  static constexpr const char* kModes[] = {"constant", "reflect", "edge"};
  GraphNode node{
      .op_type = "Pad", .inputs = {call.input, pads}, .attributes = {{"mode", kModes[static_cast<size_t>(call.mode)]}}};
  if (fill.defined()) node.inputs.push_back(call.graph.constant(fill, "value"));
  return call.graph.node(std::move(node), std::move(type));
}

// For padding with mode reflect or replicate whose pads are constants and include a negative pad. Adds a Pad node with
// the positive pads, then a Slice node that cuts off the elements of the negative pads.
Value pad_and_crop(const PadCall& call, const PadsByDim& sides, ValueType type) {
  PadsByDim grown = sides;
  std::vector<int64_t> starts, ends, axes;
  ValueType grown_type = call.type();
  for (size_t dim = 0; dim < sides.begin.size(); ++dim) {
    grown.begin[dim] = std::max<int64_t>(sides.begin[dim], 0);
    grown.end[dim] = std::max<int64_t>(sides.end[dim], 0);
    grown_type.shape[dim] = add_to_size(grown_type.shape[dim], grown.begin[dim] + grown.end[dim]);
    if (sides.begin[dim] >= 0 && sides.end[dim] >= 0) continue;
    axes.push_back(static_cast<int64_t>(dim));
    starts.push_back(std::max<int64_t>(-sides.begin[dim], 0));
    ends.push_back(sides.end[dim] < 0 ? sides.end[dim] : kToEnd);
  }
  auto pads = grown.begin;
  pads.insert(pads.end(), grown.end.begin(), grown.end.end());
  const Value whole = pad_node(call, call.graph.constant(pads, "pads"), {}, std::move(grown_type));
  return slice(call.graph, whole, starts, ends, axes, std::move(type));
}

// The part of a circular pad that is copied from the other end: `length` elements of the axis. Slice accepts a range
// beyond the end and returns fewer elements. So for an axis of unknown size a Reshape to `length` follows, which fails
// at run time when the axis is too short.
Value wrapped_part(const PadCall& call, Value middle, int64_t axis, int64_t start, int64_t end, int64_t length) {
  ValueType type = call.graph.type(middle);
  auto& size = type.shape[static_cast<size_t>(axis)];
  const bool known = std::holds_alternative<int64_t>(size);
  size = known ? Dim{length} : Dim{};
  const Value part = slice(call.graph, middle, {start}, {end}, {axis}, type);
  if (known) return part;
  type.shape[static_cast<size_t>(axis)] = length;
  std::vector<int64_t> shape(static_cast<size_t>(call.rank()));  // 0 in a Reshape keeps the size
  shape[static_cast<size_t>(axis)] = length;
  return call.graph.node({.op_type = "Reshape", .inputs = {part, call.graph.constant(shape, "shape")}},
                         std::move(type));
}

// Circular padding of one dim: crop with Slice, then Concat [copy of the end, middle, copy of the start].
Value circular_dim(const PadCall& call, Value input, int64_t axis, int64_t begin, int64_t end) {
  auto& graph = call.graph;
  ValueType type = graph.type(input);
  Dim& size = type.shape[static_cast<size_t>(axis)];
  Value middle = input;
  if (begin < 0 || end < 0) {
    const int64_t start = std::max<int64_t>(-begin, 0), stop = end < 0 ? end : kToEnd;
    size = add_to_size(size, std::min<int64_t>(end, 0) - start);
    middle = slice(graph, input, {start}, {stop}, {axis}, type);
  }
  std::vector<Value> parts;
  if (begin > 0) parts.push_back(wrapped_part(call, middle, axis, -begin, kToEnd, begin));
  parts.push_back(middle);
  if (end > 0) parts.push_back(wrapped_part(call, middle, axis, 0, end, end));
  if (parts.size() == 1) return middle;
  size = add_to_size(size, std::max<int64_t>(begin, 0) + std::max<int64_t>(end, 0));
  return graph.node({.op_type = "Concat", .inputs = std::move(parts), .attributes = {{"axis", axis}}}, std::move(type));
}

Value circular(const PadCall& call, const PadsByDim& sides) {
  Value out = call.input;
  for (int64_t dim = 0; dim < call.rank(); ++dim) {
    const auto at = static_cast<size_t>(dim);
    if (sides.begin[at] != 0 || sides.end[at] != 0) out = circular_dim(call, out, dim, sides.begin[at], sides.end[at]);
  }
  if (out == call.input) return call.graph.node({.op_type = "Identity", .inputs = {out}}, ValueType(call.type()));
  return out;
}

// Nodes that turn torch's pads into ONNX's order at run time, as PyTorch's exporter does. Zeros are appended for the
// dims without pads; the pads become rows [begin, end], last dim first; the rows are reversed, and a transpose puts all
// begins before all ends.
Value prepared_pads(const PadCall& call, Value pads) {
  auto& graph = call.graph;
  const int64_t both = 2 * call.rank();
  const auto ints = [](std::vector<Dim> shape) { return ValueType{at::kLong, std::move(shape)}; };
  const auto reshape = [&](Value value, const std::vector<int64_t>& shape, std::vector<Dim> sizes) {
    return graph.node({.op_type = "Reshape", .inputs = {value, graph.constant(shape, "shape")}},
                      ints(std::move(sizes)));
  };
  const Dim count = graph.type(pads).shape[0];
  if (graph.type(pads).dtype != at::kLong) {
    pads = graph.node({.op_type = "Cast", .inputs = {pads}, .attributes = {{"to", int64_t{data_type(at::kLong)}}}},
                      ints({count}));
  }
  Value missing;
  Dim zeros_count;
  if (const auto* known = std::get_if<int64_t>(&count)) {
    zeros_count = both - *known;
    missing = graph.constant(std::vector<int64_t>{both - *known}, "missing");
  } else {
    pads = reshape(reshape(pads, {-1, 2}, {Dim{}, 2}), {-1}, {Dim{}});  // fails at run time for an odd number
    const Value length = graph.node({.op_type = "Shape", .inputs = {pads}}, ints({1}));
    missing = graph.node({.op_type = "Sub", .inputs = {graph.constant(std::vector<int64_t>{both}, "both"), length}},
                         ints({1}));
  }
  const Value zeros = graph.node({.op_type = "ConstantOfShape",
                                  .inputs = {missing},
                                  .attributes = {{"value", at::TensorBase(at::full({1}, 0, at::kLong))}}},
                                 ints({zeros_count}));
  Value out =
      graph.node({.op_type = "Concat", .inputs = {pads, zeros}, .attributes = {{"axis", int64_t{0}}}}, ints({both}));
  out = reshape(out, {-1, 2}, {call.rank(), 2});
  const std::vector<int64_t> first{-1}, beyond{std::numeric_limits<int64_t>::min() + 1}, rows{0}, backwards{-1};
  out = graph.node({.op_type = "Slice",
                    .inputs = {out, graph.constant(first, "starts"), graph.constant(beyond, "ends"),
                               graph.constant(rows, "axes"), graph.constant(backwards, "steps")}},
                   ints({call.rank(), 2}));
  out = graph.node({.op_type = "Transpose", .inputs = {out}, .attributes = {{"perm", std::vector<int64_t>{1, 0}}}},
                   ints({2, call.rank()}));
  out = reshape(out, {-1}, {both});
  return graph.node(
      {.op_type = "Cast", .inputs = {out}, .attributes = {{"to", int64_t{data_type(at::kLong)}}}, .hint = "pads"},
      ints({both}));
}

// Pads computed at run time, reflect or replicate: Pad with max(pads, 0), then Slice off the negative pads.
Value pad_and_crop(const PadCall& call, Value pads, ValueType type) {
  auto& graph = call.graph;
  const int64_t rank = call.rank();
  const ValueType ints = graph.type(pads), half{at::kLong, {rank}};
  const auto number = [&](int64_t value, const char* hint) {
    return graph.constant(at::full({}, value, at::kLong), hint);
  };
  const Value zero = number(0, "zero");
  const auto negative = [&](Value value, const ValueType& like) {
    return graph.node({.op_type = "Less", .inputs = {value, zero}}, ValueType{at::kBool, like.shape});
  };
  const auto choose = [&](Value condition, Value yes, Value no, const ValueType& like) {
    return graph.node({.op_type = "Where", .inputs = {condition, yes, no}}, ValueType(like));
  };
  const Value grown = choose(negative(pads, ints), zero, pads, ints);
  const ValueType loose{type.dtype, std::vector<Dim>(static_cast<size_t>(rank))};
  const Value whole = pad_node(call, grown, {}, loose);
  const Value begins = slice(graph, pads, {0}, {rank}, {0}, half),
              ends = slice(graph, pads, {rank}, {2 * rank}, {0}, half);
  const Value crop = choose(negative(begins, half), begins, zero, half);
  const Value starts = graph.node({.op_type = "Neg", .inputs = {crop}}, ValueType(half));
  const Value stops = choose(negative(ends, half), ends, number(kToEnd, "to_end"), half);
  std::vector<int64_t> axes(static_cast<size_t>(rank));
  std::iota(axes.begin(), axes.end(), 0);
  return graph.node({.op_type = "Slice", .inputs = {whole, starts, stops, graph.constant(axes, "axes")}},
                    std::move(type));
}

std::optional<std::vector<int64_t>> known_pads(const Graph& graph, Value pads) {
  const auto* held = graph.tensor(pads);
  if (held == nullptr) return std::nullopt;
  const at::Tensor values = at::Tensor(*held).cpu().to(at::kLong).contiguous();
  const auto* first = values.const_data_ptr<int64_t>();
  return std::vector<int64_t>(first, first + values.numel());
}

}  // namespace

std::vector<int64_t> onnx_pads(int64_t rank, const std::vector<int64_t>& pads) {
  TESSERA_CHECK(pads.size() % 2 == 0 && static_cast<int64_t>(pads.size()) <= 2 * rank, ErrorKind::kShape,
                "[onnx.pads] found {} pads, wanted an even number of at most {}", pads.size(), 2 * rank);
  auto [begin, end] = pads_by_dim(rank, pads);
  begin.insert(begin.end(), end.begin(), end.end());
  return begin;
}

Value pad(Graph& graph, Value input, const std::vector<int64_t>& pads, std::string_view mode,
          std::optional<c10::Scalar> value) {
  const PadCall call = checked_call(graph, input, mode);
  check_count(call, static_cast<int64_t>(pads.size()));
  const at::Tensor fill = fill_value(call, value);
  const PadsByDim sides = pads_by_dim(call.rank(), pads);
  ValueType type = padded_type(call, sides);
  if (call.mode == PadMode::kCircular) return circular(call, sides);
  if (call.rank() == 0) return graph.node({.op_type = "Identity", .inputs = {input}}, std::move(type));
  const bool crops = std::ranges::any_of(pads, [](int64_t pad) { return pad < 0; });
  if (crops && call.mode != PadMode::kConstant) return pad_and_crop(call, sides, std::move(type));
  return pad_node(call, graph.constant(onnx_pads(call.rank(), pads), "pads"), fill, std::move(type));
}

Value pad(Graph& graph, Value input, Value pads, std::string_view mode, std::optional<c10::Scalar> value) {
  const PadCall call = checked_call(graph, input, mode);
  const ValueType& type = graph.type(pads);
  TESSERA_CHECK(type.rank() == 1 && (type.dtype == at::kLong || type.dtype == at::kInt), ErrorKind::kShape,
                "[onnx.pad] {}: found pads {} of type '{}', wanted one dim of int64 or int32", call.subject(),
                quote(graph.name(pads)), escape(type.to_string()));
  if (const auto known = known_pads(graph, pads)) return pad(graph, input, *known, mode, value);
  TESSERA_CHECK(call.mode != PadMode::kCircular, ErrorKind::kConfig,
                "[onnx.pad] {}: mode circular wants pads that are known when the graph is made, found {} (from {})",
                call.subject(), quote(graph.name(pads)), graph.producer_type(pads));
  ValueType out{call.type().dtype, std::vector<Dim>(call.type().shape.size())};
  if (const auto* count = std::get_if<int64_t>(&type.shape[0])) {
    check_count(call, *count);
    // `*count` is the number of elements of `pads`, two for each padded dim. So only the last *count / 2 dims of
    // `input` are padded. The dims before them keep their sizes; the sizes of the padded dims are unknown.
    const auto kept = static_cast<ptrdiff_t>(call.rank() - *count / 2);
    std::copy(call.type().shape.begin(), call.type().shape.begin() + kept, out.shape.begin());
  }
  TESSERA_CHECK(call.rank() > 0, ErrorKind::kShape, "[onnx.pad] {}: found no dims, wanted at least one to pad",
                call.subject());
  const at::Tensor fill = fill_value(call, value);
  const Value prepared = prepared_pads(call, pads);
  if (call.mode != PadMode::kConstant) return pad_and_crop(call, prepared, std::move(out));
  return pad_node(call, prepared, fill, std::move(out));
}

}  // namespace tessera::onnx
