#include "tests/conformance/samples_json.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

namespace tessera::testing {

std::string SharedSample::name() const {
  return toString(reference->sample.op.operator_name()) + "#" + std::to_string(index);
}

namespace {

using Json = nlohmann::json;

std::string type_name(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return "double";
    case at::kFloat:
      return "float";
    case at::kHalf:
      return "half";
    case at::kBFloat16:
      return "bfloat16";
    case at::kLong:
      return "long";
    case at::kInt:
      return "int";
    case at::kBool:
      return "bool";
    case at::kComplexDouble:
      return "complex";
    case at::kFloat8_e4m3fn:
      return "float8_e4m3fn";
    default:
      throw std::runtime_error(std::string("no name for type ") + toString(type));
  }
}

Json to_json(const at::Tensor& tensor) {
  Json data = Json::array();
  if (tensor.is_complex()) {
    const at::Tensor parts = at::view_as_real(tensor.resolve_conj()).contiguous();
    data = std::vector<double>(parts.const_data_ptr<double>(), parts.const_data_ptr<double>() + parts.numel());
  } else if (at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
    const at::Tensor whole = tensor.to(at::kLong).contiguous();
    data = std::vector<int64_t>(whole.const_data_ptr<int64_t>(), whole.const_data_ptr<int64_t>() + whole.numel());
  } else {
    const at::Tensor whole = tensor.to(at::kDouble).contiguous();
    data = std::vector<double>(whole.const_data_ptr<double>(), whole.const_data_ptr<double>() + whole.numel());
  }
  return {{"tensor", {{"shape", tensor.sizes().vec()}, {"dtype", type_name(tensor.scalar_type())}, {"data", data}}}};
}

Json to_json(const c10::IValue& value, const c10::Type& type) {
  if (value.isNone()) return nullptr;
  if (type.kind() == c10::TypeKind::OptionalType) return to_json(value, *type.containedType(0));
  if (value.isTensor()) return value.toTensor().defined() ? to_json(value.toTensor()) : Json(nullptr);
  if (value.isList()) {
    Json list = Json::array();
    for (const c10::IValue& element : value.toListRef()) list.push_back(to_json(element, *type.containedType(0)));
    return {{"list", list}};
  }
  if (value.isDouble()) return {{"float", std::to_string(value.toDouble())}};
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isString()) return value.toStringRef();
  throw std::runtime_error("no JSON for " + type.str());
}

// The schema gives a ScalarType the type int, so the argument's name decides.
bool is_dtype(const std::string& argument) { return argument.ends_with("dtype"); }

SharedSample shared(size_t index, const Sample& sample) {
  SharedSample one{.index = index,
                   .reference = std::make_shared<const Reference>(make_reference(sample)),
                   .slots = {},
                   .placements = {}};
  for (const auto& slot : one.reference->slots) {
    const bool out = one.reference->is_out && sample.op.schema().arguments()[slot.arg].is_out();
    if (!out) one.slots.push_back(slot);
  }
  one.placements = combinations(one.slots);
  return one;
}

}  // namespace

std::vector<SharedSample> golden_samples() {
  constexpr size_t kEach = 2;
  std::vector<SharedSample> all;
  std::string failed;
  for (const auto& op : listed_ops()) {
    if (!is_asked_for(op.name)) continue;
    try {
      const auto samples = sample_table().samples(op.name, 8, 8);
      for (size_t i = 0; i < std::min(samples.size(), kEach); ++i) all.push_back(shared(i, samples[i]));
    } catch (const std::exception& error) {
      failed += op.name + ": " + std::string(error.what()).substr(0, 300) + "\n";
    }
  }
  if (!failed.empty()) throw std::runtime_error("samples that fail: " + failed);
  return all;
}

std::vector<SharedSample> value_samples() {
  std::vector<SharedSample> all;
  for (const auto& op : listed_ops()) {
    const bool common = op.group == "matmul" || op.group == "reduction" || op.group == "loss" || op.group == "view" ||
                        op.group == "tensor" || op.group == "norm_layer";
    if (!common || op.name.ends_with("out")) continue;
    const auto samples = sample_table().samples(op.name, 4, 6);
    if (samples.empty() || !samples[0].has_values()) continue;
    auto one = shared(0, samples[0]);
    if (!one.reference->is_out) all.push_back(std::move(one));
  }
  return all;
}

void write_samples(const std::vector<SharedSample>& samples, const std::string& file) {
  Json all = Json::array();
  for (const auto& one : samples) {
    const Sample& sample = one.reference->sample;
    const auto& arguments = sample.op.schema().arguments();
    Json entry{{"op", toString(sample.op.operator_name())},
               {"index", one.index},
               {"values", sample.has_values() && !sample.canonical},
               {"tolerance", sample.tolerance},
               {"args", Json::array()},
               {"placements", Json::array()}};
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (one.reference->is_out && arguments[i].is_out()) {
        entry["outs"].push_back(arguments[i].name());
        continue;
      }
      const Json value = is_dtype(arguments[i].name()) && sample.args[i].isInt()
                             ? Json{{"dtype", type_name(static_cast<at::ScalarType>(sample.args[i].toInt()))}}
                             : to_json(sample.args[i], *arguments[i].type());
      entry["args"].push_back({arguments[i].name(), value});
    }
    if (one.reference->functional) entry["functional"] = toString(one.reference->functional->op.operator_name());
    for (const auto& combination : one.placements) {
      Json list = Json::array();
      for (const auto& placement : combination) list.push_back(to_string(placement));
      entry["placements"].push_back(list);
    }
    all.push_back(std::move(entry));
  }
  std::ofstream(file) << all.dump();
}

}  // namespace tessera::testing
