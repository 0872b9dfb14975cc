// Tests of our ONNX models: onnx's checker accepts them, protobuf writes the same bytes, and onnxruntime computes the
// values of at::pad.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "tessera/base/files/file.h"
#include "tessera/formats/onnx/model.h"
#include "tessera/formats/onnx/pad.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::onnx {
namespace {

using testing::run_python;
using testing::TempFolder;
using Pads = std::vector<int64_t>;

constexpr const char* kOnnxScript = "tests/formats/oracle/onnx_oracle.py";

// Models with their inputs and expected outputs, which the script runs.
class OnnxModels {
 public:
  // If `wanted` is undefined, onnxruntime must refuse to run the model.
  void add(const std::string& name, const Graph& graph, std::map<std::string, at::Tensor> inputs, at::Tensor wanted,
           const WriteOptions& options = {}) {
    write_model(folder_ / (name + ".onnx"), graph, options);
    nlohmann::json model{{"name", name}, {"inputs", nlohmann::json::array()}, {"runs", wanted.defined()}};
    for (const auto& [input, tensor] : inputs) {
      model["inputs"].push_back(input);
      tensors_[name + "/" + input] = tensor.contiguous();
    }
    if (wanted.defined()) tensors_[name + "//expected"] = wanted.contiguous();
    models_.push_back(model);
  }

  void expect_all_right() {
    std::vector<SafetensorsSpec> specs;
    for (const auto& [name, tensor] : tensors_) specs.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
    SafetensorsWriter writer(folder_ / "tensors.safetensors", specs);
    for (const auto& [name, tensor] : tensors_) writer.write(name, tensor);
    writer.finish();
    write_file(folder_ / "models.json", models_.dump());
    const auto run = run_python(kOnnxScript, {folder_.path().string()});
    EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
    EXPECT_EQ(run.out, std::to_string(models_.size()) + " models right\n");
  }

 private:
  static void write_file(const std::filesystem::path& path, const std::string& text) { publish_file(path, text); }

  TempFolder folder_;
  nlohmann::json models_ = nlohmann::json::array();
  std::map<std::string, at::Tensor> tensors_;
};

struct PadCase {
  std::string mode;
  Pads pads;
  std::vector<int64_t> shape;
  std::optional<c10::Scalar> value = {};
  at::ScalarType dtype = at::kFloat;
  int64_t opset = 11;
};

enum class Sizes { kNumbers, kNames };
enum class Given { kKnown, kOfKnownNumber, kOfAnyNumber };

std::string name_of(const PadCase& c, Sizes sizes, Given given) {
  std::string name = c.mode + "_" + std::to_string(c.shape.size()) + "d";
  for (const int64_t pad : c.pads) name += "_" + std::to_string(pad);
  name += std::string("_") + c10::toString(c.dtype) + "_opset" + std::to_string(c.opset);
  return name + (sizes == Sizes::kNames ? "_names" : "") +
         (given == Given::kKnown           ? ""
          : given == Given::kOfKnownNumber ? "_given"
                                           : "_any");
}

// `extra` distinguishes the names of models with equal cases. If `refused` is set, the model must not run.
void add_pad(OnnxModels& models, const PadCase& c, Sizes sizes = Sizes::kNumbers, Given given = Given::kKnown,
             const std::string& extra = "", bool refused = false) {
  Graph graph({.opset = c.opset});
  ValueType type{c.dtype, {c.shape.begin(), c.shape.end()}};
  if (sizes == Sizes::kNames) {
    for (size_t i = 0; i < type.shape.size(); ++i) type.shape[i] = "size" + std::to_string(i);
  }
  const auto x = graph.input("x", type);
  int64_t numel = 1;
  for (const int64_t size : c.shape) numel *= size;
  const auto values = at::arange(numel).sub(3).remainder(100).to(c.dtype).view(c.shape);
  std::map<std::string, at::Tensor> inputs{{"x", values}};
  Value y;
  if (given == Given::kKnown) {
    y = pad(graph, x, c.pads, c.mode, c.value);
  } else {
    const auto count = static_cast<int64_t>(c.pads.size());
    const bool wide = count % 4 == 0;
    const auto pads =
        graph.input("pads", {wide ? at::kLong : at::kInt, {given == Given::kOfAnyNumber ? Dim{"count"} : Dim{count}}});
    inputs["pads"] = at::tensor(c.pads, at::kLong).to(wide ? at::kLong : at::kInt);
    y = pad(graph, x, pads, c.mode, c.value);
  }
  graph.output(y, "y");
  const auto wanted =
      refused ? at::Tensor()
              : at::pad(values, c.pads, c.mode, c.value ? std::optional(c.value->toDouble()) : std::nullopt);
  models.add(name_of(c, sizes, given) + extra, graph, inputs, wanted);
}

// Every mode, with the ranks and numbers of pads that at::pad takes. Every dim is 5, which allows pads of -2 to 3.
std::vector<PadCase> all_shapes_of_pads(std::mt19937& random) {
  std::vector<PadCase> out;
  const auto add = [&](const std::string& mode, size_t rank, size_t count) {
    const auto draw = [&](int64_t low, int64_t high) {
      Pads pads(count);
      for (auto& pad : pads) pad = std::uniform_int_distribution<int64_t>(low, high)(random);
      out.push_back({.mode = mode, .pads = pads, .shape = std::vector<int64_t>(rank, 5)});
    };
    draw(0, 3);
    if (count == 0) return;
    draw(-2, -1);
    draw(-2, 3);
    draw(-2, 3);
  };
  for (size_t rank = 1; rank <= 5; ++rank) {
    for (size_t count = 0; count <= 2 * rank; count += 2) add("constant", rank, count);
  }
  for (const std::string mode : {"reflect", "replicate", "circular"}) {
    for (size_t dims = 1; dims <= 3; ++dims) {
      add(mode, dims + 1, 2 * dims);
      add(mode, dims + 2, 2 * dims);
    }
  }
  return out;
}

TEST(OnnxOracle, StaticPadsOfEveryModeAndRankMatchTorch) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  OnnxModels models;
  int number = 0;
  for (const auto& c : all_shapes_of_pads(random)) {
    const auto extra = "_" + std::to_string(++number);
    add_pad(models, c, number % 3 == 0 ? Sizes::kNames : Sizes::kNumbers, Given::kKnown, extra);
  }
  models.expect_all_right();
}

TEST(OnnxOracle, DynamicPadsMatchTorch) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  OnnxModels models;
  int number = 0;
  for (const auto& c : all_shapes_of_pads(random)) {
    if (c.mode == "circular" || ++number % 2 == 0) continue;
    const auto extra = "_" + std::to_string(number);
    add_pad(models, c, Sizes::kNumbers, Given::kOfKnownNumber, extra);
    add_pad(models, c, Sizes::kNames, Given::kOfAnyNumber, extra);
  }
  // Errors that appear only when the model runs: an odd number of pads, and too many pads.
  add_pad(models, {.mode = "constant", .pads = {1}, .shape = {5, 5}}, Sizes::kNumbers, Given::kOfAnyNumber, "", true);
  add_pad(models, {.mode = "constant", .pads = Pads(6, 1), .shape = {5, 5}}, Sizes::kNumbers, Given::kOfAnyNumber, "",
          true);
  models.expect_all_right();
}

TEST(OnnxOracle, PadEdgeCasesMatchTorch) {
  OnnxModels models;
  const std::vector<int64_t> row{1, 3, 4};
  const std::vector<std::pair<std::string, std::vector<Pads>>> edges{
      {"constant", {{-4, 4}, {4, -4}, {-4, 0}, {-2, -2}, {3, -3}, {9, 9}, {0, 0}}},
      {"reflect", {{-1, 0}, {0, -1}, {-3, 3}, {3, -3}, {3, -2}, {3, 3}, {0, 0}}},
      {"replicate", {{-1, 0}, {0, -1}, {-4, 4}, {4, -4}, {-6, 9}, {9, -6}, {9, 9}, {0, 0}}},
      {"circular", {{-1, 0}, {0, -1}, {-2, -2}, {-1, 2}, {2, -1}, {4, 4}, {-1, 3}, {-4, 0}, {0, 0}}}};
  for (const auto& [mode, all] : edges) {
    for (const auto& pads : all) {
      add_pad(models, {.mode = mode, .pads = pads, .shape = row});
      add_pad(models, {.mode = mode, .pads = pads, .shape = row}, Sizes::kNames);
      if (mode == "circular") continue;
      add_pad(models, {.mode = mode, .pads = pads, .shape = row}, Sizes::kNumbers, Given::kOfKnownNumber);
    }
  }
  add_pad(models, {.mode = "constant", .pads = {}, .shape = {}});
  add_pad(models, {.mode = "constant", .pads = {1, 1}, .shape = {2, 0, 4}});
  add_pad(models, {.mode = "constant", .pads = {1, 1, 2, 0}, .shape = {2, 0, 4}}, Sizes::kNames);
  add_pad(models, {.mode = "circular", .pads = {1, 2}, .shape = {0, 3, 4}}, Sizes::kNames);
  // The pads wrap around more than once. The size is known only when the model runs.
  add_pad(models, {.mode = "circular", .pads = {5, 0}, .shape = row}, Sizes::kNames, Given::kKnown, "", true);
  add_pad(models, {.mode = "circular", .pads = {-2, 3}, .shape = row}, Sizes::kNames, Given::kKnown, "", true);
  models.expect_all_right();
}

TEST(OnnxOracle, PadDtypesValuesAndOpsetsMatchTorch) {
  OnnxModels models;
  const std::vector<int64_t> shape{2, 3, 4};
  for (const auto dtype : {at::kDouble, at::kHalf, at::kLong, at::kInt, at::kChar, at::kByte}) {
    add_pad(models, {.mode = "constant", .pads = {1, -1}, .shape = shape, .value = 2.7, .dtype = dtype});
    add_pad(models, {.mode = "replicate", .pads = {1, 2}, .shape = shape, .dtype = dtype});
    add_pad(models, {.mode = "circular", .pads = {1, -1}, .shape = shape, .dtype = dtype});
  }
  add_pad(models, {.mode = "circular", .pads = {1, 1}, .shape = shape, .dtype = at::kBool});
  add_pad(models, {.mode = "constant", .pads = {1, 1}, .shape = shape, .value = 2.7, .dtype = at::kBool, .opset = 13});
  const double infinity = std::numeric_limits<double>::infinity();
  add_pad(models, {.mode = "constant", .pads = {1, 1}, .shape = shape, .value = -infinity}, Sizes::kNumbers,
          Given::kKnown, "_infinite");
  add_pad(models, {.mode = "constant", .pads = {1, 1}, .shape = shape, .value = infinity - infinity}, Sizes::kNumbers,
          Given::kKnown, "_nan");
  for (const int64_t opset : {12, 13, 14, 15, 18, 19, 20, 21, 22, 23}) {
    for (const std::string mode : {"constant", "reflect", "replicate", "circular"}) {
      const PadCase c{.mode = mode, .pads = {2, -1, -1, 1}, .shape = {2, 3, 4, 5}, .opset = opset};
      add_pad(models, c, Sizes::kNames);
      if (mode != "circular") add_pad(models, c, Sizes::kNames, Given::kOfKnownNumber);
    }
  }
  models.expect_all_right();
}

TEST(OnnxOracle, InlineAndExternalInitializersOfEveryDtypeAreRead) {
  OnnxModels models;
  for (const bool beside : {false, true}) {
    Graph graph;
    const auto x = graph.input("x", {at::kFloat, {"rows", 8}});
    const auto weight = at::randn({8, 300}), bias = at::randn({300});
    const auto w = graph.initializer("weight", weight.t().contiguous().t()), b = graph.initializer("bias", bias);
    for (const auto dtype : {at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar,
                             at::kByte, at::kBool, at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat}) {
      graph.initializer(c10::toString(dtype), at::arange(900).remainder(2).to(dtype));
    }
    const ValueType out{at::kFloat, {"rows", 300}};
    const auto y = graph.node({.op_type = "MatMul", .inputs = {x, w}}, out);
    graph.output(graph.node({.op_type = "Add", .inputs = {y, b}}, out), "y");
    const auto values = at::randint(-8, 8, {5, 8}).to(at::kFloat);
    models.add(beside ? "beside" : "inside", graph, {{"x", values}}, at::matmul(values, weight).add(bias),
               {.external_from_bytes = beside ? 1200 : std::numeric_limits<int64_t>::max()});
  }
  models.expect_all_right();
}

}  // namespace
}  // namespace tessera::onnx
