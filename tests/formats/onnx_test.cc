// Tests of ONNX models: their bytes, the names and types of the graph, the nodes that pad makes, and the arguments that
// pad refuses.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tessera/base/files/file.h"
#include "tessera/base/version.h"
#include "tessera/formats/onnx/model.h"
#include "tessera/formats/onnx/pad.h"
#include "tessera/formats/onnx/protobuf_message.h"
#include "tests/formats/file_bytes.h"
#include "tests/support/temp_folder.h"

namespace tessera::onnx {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::raw;
using testing::TempFolder;
using namespace std::string_literals;

std::vector<std::string> operators(const Graph& graph) {
  std::vector<std::string> out;
  for (const auto& node : graph.nodes()) out.push_back(node.op_type);
  return out;
}

std::vector<int64_t> ints(const Graph& graph, Value value) {
  const at::Tensor tensor(*graph.tensor(value));
  return {tensor.const_data_ptr<int64_t>(), tensor.const_data_ptr<int64_t>() + tensor.numel()};
}

// A graph with one input, which pad reads.
struct Padded {
  explicit Padded(std::vector<Dim> shape, at::ScalarType dtype = at::kFloat, int64_t opset = 11)
      : graph({.opset = opset}), x(graph.input("x", {dtype, std::move(shape)})) {}
  std::string error(ErrorKind kind, const std::vector<int64_t>& pads, std::string_view mode = "constant",
                    std::optional<c10::Scalar> value = {}) {
    return error_of(kind, [&] { pad(graph, x, pads, mode, value); });
  }
  Graph graph;
  Value x;
};

TEST(OnnxWire, NumbersAreVarintsAndTextIsLengthPrefixed) {
  ProtobufMessage message;
  message.number(1, 300);
  message.number(16, -1);
  message.real(2, 1.0F);
  message.text(3, "ab");
  EXPECT_EQ(message.bytes(),
            "\x08\xac\x02"
            "\x80\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
            "\x15\x00\x00\x80\x3f"
            "\x1a\x02"
            "ab"s);
}

TEST(OnnxModel, SmallestModelHasTheExpectedBytes) {
  Graph graph({.name = "g"});
  graph.output(graph.input("x", {at::kFloat, {2}}), "y");
  const std::string version = tessera::version();
  const auto value = [](const std::string& name) {
    return "\x0f\x0a\x01" + name + "\x12\x0a\x0a\x08\x08\x01\x12\x04\x0a\x02\x08\x02";
  };
  const std::string node = "\x0a\x1c\x0a\x01x\x12\x01y\x1a\x0aIdentity_0\x22\x08Identity";
  const std::string body = node + "\x12\x01g" + "Z" + value("x") + "b" + value("y");
  EXPECT_EQ(model_bytes(graph), "\x08\x06\x12\x07tessera\x1a" + std::string(1, static_cast<char>(version.size())) +
                                    version + ":" + std::string(1, static_cast<char>(body.size())) + body +
                                    "B\x04\x0a\x00\x10\x0b"s);
}

TEST(OnnxModel, ExternalDataAreAlignedInAFileOfTheirOwn) {
  TempFolder folder;
  Graph graph;
  const auto bytes = at::arange(10, at::kByte), floats = at::arange(6, at::kFloat).view({2, 3}).t();
  graph.initializer("small", at::arange(3, at::kByte));
  graph.initializer("bytes", bytes);
  graph.output(graph.initializer("floats", floats), "y");
  write_model(folder / "m.onnx", graph, {.external_from_bytes = 10, .alignment_bytes = 64});
  const auto model = read_file(folder / "m.onnx"), data = read_file(folder / "m.onnx.data");
  ASSERT_EQ(data.size(), 64U + 24U);
  EXPECT_EQ(data.substr(0, 10), "\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09"s);
  EXPECT_EQ(data.substr(10, 54), std::string(54, '\0'));
  // The values of the transposed tensor in row-major order.
  EXPECT_EQ(data.substr(64), raw(0.F) + raw(3.F) + raw(1.F) + raw(4.F) + raw(2.F) + raw(5.F));
  EXPECT_THAT(model, HasSubstr("j\x17\x0a\x08location\x12\x0bm.onnx.data"s));
  EXPECT_THAT(model, HasSubstr("\x0a\x06offset\x12\x02"
                               "64"s));
  EXPECT_THAT(model, HasSubstr("\x0a\x06length\x12\x02"
                               "24p\x01"s));
  EXPECT_THAT(model, HasSubstr("B\x05smallJ\x03\x00\x01\x02"s));
  // All tensors are inside the model file now, so the model names no external file.
  write_model(folder / "m.onnx", graph);
  EXPECT_THAT(read_file(folder / "m.onnx"), ::testing::Not(HasSubstr("location")));
}

TEST(OnnxModel, BadOptionsAndGraphsWithoutOutputsAreRefusedBeforeAnythingIsWritten) {
  TempFolder folder;
  Graph graph;
  const auto x = graph.input("x", {at::kFloat, {2}});
  const auto path = folder / "m.onnx";
  EXPECT_THAT(error_of(ErrorKind::kShape, [&] { write_model(path, graph); }), HasSubstr("no output"));
  graph.output(x);
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { write_model(path, graph, {.alignment_bytes = 48}); }),
              HasSubstr("48"));
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { write_model(path, graph, {.external_from_bytes = 0}); }),
              HasSubstr("external_from_bytes"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  error_of(ErrorKind::kIo, [&] { write_model(folder / "none" / "m.onnx", graph); });
}

TEST(OnnxGraph, NamesAreUniqueAndUserNamesAreKept) {
  Graph graph;
  const auto x = graph.input("x", {at::kFloat, {"n", 3, {}}});
  const auto a = graph.node({.op_type = "Relu", .inputs = {x}}, graph.type(x));
  const auto b = graph.node({.op_type = "Relu", .inputs = {a}}, graph.type(x));
  const auto c = graph.node({.op_type = "Neg", .inputs = {b}, .hint = "x"}, graph.type(x));
  EXPECT_EQ(graph.name(a), "Relu");
  EXPECT_EQ(graph.name(b), "Relu_1");
  EXPECT_EQ(graph.name(c), "x_1");
  EXPECT_EQ(graph.type(c).to_string(), "Float(n, 3, *)");
  graph.output(b, "y");
  graph.output(b, "z");  // b is an output already, so this output is a copy
  graph.output(x, "w");
  EXPECT_EQ(graph.name(b), "y");
  EXPECT_EQ(operators(graph), (std::vector<std::string>{"Relu", "Relu", "Neg", "Identity", "Identity"}));
  EXPECT_EQ(graph.producer_type(x), "Param");
  EXPECT_EQ(graph.producer_type(c), "Neg");
  EXPECT_EQ(graph.producer_type(graph.constant(std::vector<int64_t>{1})), "Constant");
}

TEST(OnnxGraph, RefusesUnsupportedNamesDtypesAndOpsets) {
  Graph graph, other;
  const auto x = graph.input("x", {at::kFloat, {2}});
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { graph.input("x", {}); }), HasSubstr("'x': the name is taken"));
  error_of(ErrorKind::kConfig, [&] { graph.input("", {}); });
  error_of(ErrorKind::kConfig, [&] { graph.input("\xff", {}); });
  error_of(ErrorKind::kConfig, [&] { graph.input("q", {at::kQInt8, {}}); });
  error_of(ErrorKind::kShape, [&] { graph.input("n", {at::kFloat, {-1}}); });
  error_of(ErrorKind::kConfig, [&] { Graph({.opset = 10}); });
  error_of(ErrorKind::kConfig, [&] { Graph({.opset = 24}); });
  error_of(ErrorKind::kShape, [&] { graph.initializer("m", at::empty({2}, at::device(at::kMeta))); });
  error_of(ErrorKind::kShape, [&] { graph.initializer("u", at::Tensor()); });
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { other.node({.op_type = "Neg", .inputs = {x}}, ValueType{}); }),
              HasSubstr("another graph"));
  EXPECT_TRUE(other.nodes().empty());
}

TEST(OnnxPad, PadsAreReorderedForOnnx) {
  EXPECT_EQ(onnx_pads(4, {1, 2, 3, 4}), (std::vector<int64_t>{0, 0, 3, 1, 0, 0, 4, 2}));
  EXPECT_EQ(onnx_pads(1, {}), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(onnx_pads(2, {-1, 2, 3, -4}), (std::vector<int64_t>{3, -1, -4, 2}));
  error_of(ErrorKind::kShape, [] { onnx_pads(1, {1, 2, 3, 4}); });
}

TEST(OnnxPad, StaticPadsAreOneNodeWithConstantsOfTheInputDtype) {
  Padded p({2, "w"}, at::kLong);
  const auto y = pad(p.graph, p.x, {1, 2}, "constant", 2.7);
  ASSERT_EQ(operators(p.graph), std::vector<std::string>{"Pad"});
  const auto& node = p.graph.nodes()[0];
  EXPECT_EQ(std::get<std::string>(node.attributes[0].second), "constant");
  EXPECT_EQ(ints(p.graph, node.inputs[1]), (std::vector<int64_t>{0, 1, 0, 2}));
  EXPECT_EQ(ints(p.graph, node.inputs[2]), std::vector<int64_t>{2});
  EXPECT_EQ(p.graph.type(y).to_string(), "Long(2, *)");
  Padded q({2, 3, 4});
  const auto z = pad(q.graph, q.x, {1, 2}, "replicate");
  EXPECT_EQ(q.graph.nodes()[0].inputs.size(), 2U);
  EXPECT_EQ(q.graph.type(z).to_string(), "Float(2, 3, 7)");
}

TEST(OnnxPad, DynamicPadsAreTheNodesOfTorchsExporter) {
  Padded p({2, 3, 4});
  const auto pads = p.graph.input("pads", {at::kLong, {4}});
  pad(p.graph, p.x, pads);
  EXPECT_EQ(operators(p.graph), (std::vector<std::string>{"ConstantOfShape", "Concat", "Reshape", "Slice", "Transpose",
                                                          "Reshape", "Cast", "Pad"}));
  Padded q({2, 3, 4});
  const auto known = q.graph.initializer("pads", at::tensor({1, 2, 0, 0}, at::kInt));
  pad(q.graph, q.x, known, "reflect");
  EXPECT_EQ(operators(q.graph), std::vector<std::string>{"Pad"});
}

TEST(OnnxPad, CircularModePadsOneDimAtATimeAndCropsFirst) {
  Padded p({1, 2, 5, 6});
  const auto y = pad(p.graph, p.x, {-1, 0, 2, 1}, "circular");
  // Dim 2 needs two slices around the middle. Dim 3 needs one slice, which reaches the end.
  EXPECT_EQ(operators(p.graph), (std::vector<std::string>{"Slice", "Slice", "Concat", "Slice"}));
  const auto& crop = p.graph.nodes().back();
  EXPECT_EQ(ints(p.graph, crop.inputs[1]), std::vector<int64_t>{1});
  EXPECT_EQ(ints(p.graph, crop.inputs[2]), std::vector<int64_t>{std::numeric_limits<int64_t>::max()});
  EXPECT_EQ(p.graph.type(y).to_string(), "Float(1, 2, 8, 5)");
}

TEST(OnnxPad, UnknownModeHasTorchsErrorMessage) {
  Padded p({1, "w", 4});
  const auto y = p.graph.node({.op_type = "Relu", .inputs = {p.x}}, ValueType{at::kDouble, {2, {}}});
  EXPECT_THAT(p.error(ErrorKind::kConfig, {1, 1}, "bogus"),
              HasSubstr("Unrecognized padding mode bogus  [Caused by the value 'x' (type 'Float(1, w, 4)') in the "
                        "TorchScript graph. The containing node has kind 'prim::Param'.]"));
  EXPECT_THAT(
      error_of(ErrorKind::kConfig,
               [&] {
                 pad(p.graph, y, {1, 1}, "Reflect\n");
               }),
      HasSubstr("Unrecognized padding mode Reflect\\n  [Caused by the value 'Relu' (type 'Double(2, *)') in the "
                "TorchScript graph. The containing node has kind 'onnx::Relu'.]"));
}

TEST(OnnxPad, RefusesWhatAtPadRefusesAndNamesTheDimAndThePads) {
  Padded p({2, 3, 4}), scalar({});
  EXPECT_THAT(p.error(ErrorKind::kShape, {1}), HasSubstr("divisible by 2"));
  EXPECT_THAT(p.error(ErrorKind::kShape, {1, 1, 1, 1, 1, 1, 1, 1}), HasSubstr("two times the input dimension"));
  EXPECT_THAT(p.error(ErrorKind::kShape, {1, 1, 1, 1, 1, 1}, "reflect"),
              HasSubstr("Padding size 6 is not supported for 3D"));
  EXPECT_THAT(p.error(ErrorKind::kShape, {}, "circular"), HasSubstr("Padding size 0 is not supported for 3D"));
  EXPECT_THAT(p.error(ErrorKind::kShape, {4, 0}, "reflect"), HasSubstr("dim 2 of size 4, pads (4, 0)"));
  EXPECT_THAT(p.error(ErrorKind::kShape, {-2, -2}, "replicate"), HasSubstr("nothing would be left"));
  EXPECT_THAT(p.error(ErrorKind::kShape, {-3, -2}), HasSubstr("crop more than there is"));
  EXPECT_THAT(p.error(ErrorKind::kShape, {5, 0}, "circular"), HasSubstr("wrapping around more than once"));
  // at::pad returns uninitialized memory for these pads.
  EXPECT_THAT(p.error(ErrorKind::kShape, {3, -2}, "circular"), HasSubstr("wrapping around more than once"));
  EXPECT_THAT(p.error(ErrorKind::kShape, {std::numeric_limits<int64_t>::min(), 0}), HasSubstr("2^48"));
  EXPECT_THAT(p.error(ErrorKind::kConfig, {1, 1}, "reflect", 3.0), HasSubstr("doesn't take in value argument"));
  EXPECT_THAT(scalar.error(ErrorKind::kShape, {1, 1}), HasSubstr("two times the input dimension"));
  Padded bytes({4}, at::kByte), flags({4}, at::kBool);
  EXPECT_THAT(bytes.error(ErrorKind::kConfig, {1, 1}, "constant", 300), HasSubstr("Byte"));
  EXPECT_THAT(flags.error(ErrorKind::kConfig, {1, 1}), HasSubstr("opset 13"));
  EXPECT_TRUE(p.graph.nodes().empty());
  EXPECT_TRUE(p.graph.initializers().empty());
}

TEST(OnnxPad, DynamicPadsRequireAnIntegerVectorAndANonCircularMode) {
  Padded p({2, 3, 4});
  const auto reals = p.graph.input("reals", {at::kFloat, {2}}), odd = p.graph.input("odd", {at::kLong, {3}});
  const auto grid = p.graph.input("grid", {at::kLong, {1, 2}}), fine = p.graph.input("fine", {at::kLong, {2}});
  const auto refused = [&](Value pads, ErrorKind kind, std::string_view mode) {
    return error_of(kind, [&] { pad(p.graph, p.x, pads, mode); });
  };
  EXPECT_THAT(refused(reals, ErrorKind::kShape, "constant"), HasSubstr("'reals' of type 'Float(2)'"));
  EXPECT_THAT(refused(grid, ErrorKind::kShape, "constant"), HasSubstr("'Long(1, 2)'"));
  EXPECT_THAT(refused(odd, ErrorKind::kShape, "constant"), HasSubstr("divisible by 2"));
  EXPECT_THAT(refused(fine, ErrorKind::kConfig, "circular"), HasSubstr("known when the graph is made"));
}

}  // namespace
}  // namespace tessera::onnx
