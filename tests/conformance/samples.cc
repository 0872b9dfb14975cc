#include "tests/conformance/samples.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "tests/support/process.h"

namespace tessera::testing {

SampleMaker::SampleMaker(c10::OperatorHandle op, int64_t n, int64_t m)
    : n(n), m(m), k(m % 4 == 0 ? 4 : 3), op_(std::move(op)), seed_(static_cast<uint64_t>(n * 1000 + m * 10)) {
  for (const char c : op_.operator_name().name) seed_ = seed_ * 31 + static_cast<uint64_t>(c);
}

bool SampleMaker::has(const std::string& argument) const {
  const auto& arguments = schema().arguments();
  return std::ranges::any_of(arguments, [&](const c10::Argument& a) { return a.name() == argument; });
}

Sample& SampleMaker::add(const NamedArguments& given) {
  Sample sample{.op = op_,
                .label = fmt::format("{} n={} m={} #{}", toString(op_.operator_name()), n, m, samples_.size())};
  for (const auto& [name, value] : given) {
    if (!has(name)) throw std::runtime_error(sample.label + ": the schema has no argument " + name);
  }
  for (const auto& argument : schema().arguments()) {
    const auto found = std::ranges::find_if(given, [&](const auto& one) { return one.first == argument.name(); });
    if (found != given.end()) {
      sample.args.push_back(found->second);
    } else if (argument.default_value()) {
      sample.args.push_back(*argument.default_value());
    } else if (argument.is_out() || argument.type()->kind() == c10::TypeKind::OptionalType) {
      sample.args.emplace_back();
    } else {
      throw std::runtime_error(sample.label + ": the sample lacks argument " + argument.name());
    }
  }
  samples_.push_back(std::move(sample));
  return samples_.back();
}

at::Generator SampleMaker::next_generator() { return at::detail::createCPUGenerator(seed_++); }

// Returns multiples of 2-20, so that the shares of a Partial add up exactly in any order. An operation may compare
// values that it has reduced twice (amax and its gradient), and then the last bit would matter.
static at::Tensor coarse(const at::Tensor& values) { return at::round(values * 0x1p20) * 0x1p-20; }

at::Tensor SampleMaker::normal(at::IntArrayRef shape) {
  return coarse(at::randn(shape, next_generator(), at::kDouble));
}

at::Tensor SampleMaker::uniform(double low, double high, at::IntArrayRef shape) {
  return coarse(at::rand(shape, next_generator(), at::kDouble) * (high - low) + low);
}

at::Tensor SampleMaker::integers(int64_t low, int64_t high, at::IntArrayRef shape) {
  return at::randint(low, high, shape, next_generator(), at::kLong);
}

at::Tensor SampleMaker::flags(at::IntArrayRef shape) { return uniform(0, 1, shape) < 0.5; }

at::Tensor SampleMaker::complex(at::IntArrayRef shape) { return at::complex(normal(shape), normal(shape)); }

at::Tensor SampleMaker::distinct(at::IntArrayRef shape) {
  const int64_t count = c10::multiply_integers(shape);
  return at::randperm(count, next_generator(), at::kDouble).view(shape) - static_cast<double>(count) / 2 + 0.25;
}

at::Tensor SampleMaker::well_conditioned(at::IntArrayRef shape) {
  const int64_t size = shape.back();
  return uniform(-0.5, 0.5, shape) + at::eye(size, at::kDouble) * static_cast<double>(size + 1);
}

at::Tensor SampleMaker::positive_definite(at::IntArrayRef shape) {
  const at::Tensor root = well_conditioned(shape);
  return root.matmul(root.mT()) + at::eye(shape.back(), at::kDouble);
}

SampleTable::SampleTable() {
  add_matmul_samples(*this);
  add_reduction_samples(*this);
  add_view_samples(*this);
  add_tensor_samples(*this);
  add_index_samples(*this);
  add_foreach_samples(*this);
  add_linalg_samples(*this);
  add_fft_samples(*this);
  add_image_samples(*this);
  add_norm_layer_samples(*this);
  add_loss_samples(*this);
  add_attention_samples(*this);
  add_random_samples(*this);
  add_pointwise_samples(*this);
}

void SampleTable::add(const std::string& name, SampleBuilder builder) {
  if (!builders_.emplace(name, std::move(builder)).second) throw std::runtime_error("two sample builders for " + name);
}

void SampleTable::add(std::initializer_list<const char*> names, const SampleBuilder& builder) {
  for (const char* name : names) add(name, builder);
}

const SampleBuilder* SampleTable::find(const c10::OperatorName& name) const {
  std::vector<std::string> keys{toString(name)};
  std::string_view overload = name.overload_name;
  for (const std::string_view suffix : {"_out", "out"}) {
    if (overload.ends_with(suffix)) {
      overload.remove_suffix(suffix.size());
      break;
    }
  }
  const std::string dotted = overload.empty() ? "" : "." + std::string(overload);
  keys.push_back(name.name + dotted);
  if (name.name.ends_with('_') && !name.name.ends_with("__")) {
    keys.push_back(name.name.substr(0, name.name.size() - 1) + dotted);
  }
  keys.push_back(name.name);
  if (keys.size() == 4) keys.push_back(name.name.substr(0, name.name.size() - 1));
  for (const auto& key : keys) {
    if (const auto found = builders_.find(key); found != builders_.end()) return &found->second;
  }
  return nullptr;
}

namespace {
c10::OperatorName parsed(const std::string& name) {
  const auto dot = name.find('.');
  return {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
}
}  // namespace

bool SampleTable::contains(const std::string& name) const { return find(parsed(name)) != nullptr; }

std::vector<Sample> SampleTable::samples(const std::string& name, int64_t n, int64_t m) const {
  const c10::OperatorName parts = parsed(name);
  const auto op = c10::Dispatcher::singleton().findSchema(parts);
  if (!op) throw std::runtime_error(name + ": libtorch has no such operation");
  SampleMaker maker(*op, n, m);
  if (const SampleBuilder* builder = find(parts)) (*builder)(maker);
  return maker.take();
}

const SampleTable& sample_table() {
  static const SampleTable table;
  return table;
}

const std::vector<ListedOp>& listed_ops() {
  static const std::vector<ListedOp> ops = [] {
    std::vector<ListedOp> read;
    std::ifstream file(source_folder() / "tests/conformance/ops.txt");
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      ListedOp op;
      if (!line.starts_with('#') && words >> op.name >> op.group) read.push_back(std::move(op));
    }
    return read;
  }();
  return ops;
}

bool is_asked_for(const std::string& op) {
  const char* only = std::getenv("TESSERA_OP");
  return only == nullptr || op.find(only) != std::string::npos;
}

std::vector<std::string> op_groups() {
  std::vector<std::string> groups;
  for (const auto& op : listed_ops()) {
    if (std::ranges::find(groups, op.group) == groups.end()) groups.push_back(op.group);
  }
  return groups;
}

}  // namespace tessera::testing
