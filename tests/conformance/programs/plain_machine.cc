// Plain tensors run a program, in one of its twins.
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "tests/conformance/programs/evaluate.h"
#include "tests/conformance/programs/inputs.h"

namespace tessera::testing {

at::Tensor PlainMachine::input(const Step& step, uint64_t seed) {
  at::Tensor made = make_plain(step, seed);
  if (twin_ == Twin::kWide) {
    made = made.to(type_of(made.scalar_type()));
  }
  return made.set_requires_grad(step.grad);
}

at::Tensor PlainMachine::redistribute(const at::Tensor& tensor, const Step&) { return tensor.clone(); }

c10::ScalarType PlainMachine::type_of(c10::ScalarType asked) const {
  if (twin_ != Twin::kWide || !is_narrow(asked)) {
    return asked;
  }
  return c10::isComplexType(asked) ? at::kComplexDouble : at::kDouble;
}

namespace {

// Elements may be read after others are written.
bool reads_elsewhere(const std::string& op) {
  static const char* const kStarts[] = {"addmm_", "addbmm_",  "baddbmm_",        "addmv_", "addr_",
                                        "index_", "scatter_", "masked_scatter_", "put_",   "cum"};
  return std::any_of(std::begin(kStarts), std::end(kStarts), [&](const char* start) { return op.starts_with(start); });
}

bool has_derivative(const std::string& op) {
  static const char* const kStarts[] = {"logical_", "bitwise_", "heaviside_", "floor_divide_", "eq_",
                                        "ne_",      "lt_",      "le_",        "gt_",           "ge_"};
  return std::none_of(std::begin(kStarts), std::end(kStarts), [&](const char* start) { return op.starts_with(start); });
}

[[noreturn]] void leave_open(const Step& step, const char* what) {
  throw std::runtime_error(fmt::format("program: {} {}", to_text(step), what));
}

}  // namespace

void PlainMachine::before(const Step& step, const Values& values) {
  if (!writes(step)) {
    return;
  }
  std::vector<int> written, read;
  const auto& arguments = find_op(step.op).schema().arguments();
  for (size_t i = 0; i < step.args.size() && i < arguments.size(); ++i) {
    const auto ids = refs_of({step.args[i]});
    const auto* alias = arguments[i].alias_info();
    auto& list = alias != nullptr && alias->isWrite() ? written : read;
    list.insert(list.end(), ids.begin(), ids.end());
  }
  for (size_t i = 0; i < written.size(); ++i) {
    const at::Tensor& target = values.tensors.at(written[i]);
    const auto shares = [&](const at::Tensor& other) { return target.is_alias_of(other); };
    const auto open = [&](int id) {
      const at::Tensor& other = values.tensors.at(id);
      const bool same = target.sizes() == other.sizes() && target.strides() == other.strides() &&
                        target.storage_offset() == other.storage_offset();
      return shares(other) && (!same || reads_elsewhere(step.op));
    };
    if (std::any_of(read.begin(), read.end(), open) ||
        std::any_of(written.begin(), written.begin() + static_cast<int64_t>(i),
                    [&](int id) { return shares(values.tensors.at(id)); })) {
      leave_open(step, "writes to what it reads");
    }
    if (std::any_of(frozen_.begin(), frozen_.end(), shares)) {
      leave_open(step, "writes to what may be shared or not");
    }
  }
  const auto takes_gradient = [&](int id) { return values.tensors.at(id).requires_grad(); };
  if (!has_derivative(step.op) && (std::any_of(written.begin(), written.end(), takes_gradient) ||
                                   std::any_of(read.begin(), read.end(), takes_gradient))) {
    leave_open(step, "has no derivative");
  }
}

namespace {

// Operations that divide or take roots inside: what they give may be inexact on other ranks though it is exact here.
bool rounds_inside(const std::string& op) {
  for (const char* part :
       {"mean", "var", "std",    "norm", "div",  "softmax", "sumexp", "prod", "entropy", "loss",
        "kl_",  "nll", "cosine", "pow",  "dist", "inv",     "solve",  "det",  "pool",    "reciprocal"}) {
    if (op.find(part) != std::string::npos) {
      return true;
    }
  }
  return false;
}

// Their results may be exact though the sums and roots inside are not.
bool rounds_in_sums(const std::string& op) {
  for (const char* part :
       {"mean", "var", "std", "norm", "softmax", "sumexp", "prod", "cosine", "entropy", "loss", "dist"}) {
    if (op.find(part) != std::string::npos) {
      return true;
    }
  }
  return false;
}

bool is_coarse(double x) { return std::abs(x) < 0x1p20 && x * 0x1p20 == std::rint(x * 0x1p20); }

void disturb_along(double* data, at::IntArrayRef sizes, at::IntArrayRef strides, bool all, bool contrary,
                   uint64_t& state) {
  if (sizes.empty()) {
    if (*data == 0) {  // zeros of shares may add up to either: the twins have opposite ones, however often disturbed
      *data = ((next_number(state) & 1) != 0) != contrary ? -0.0 : 0.0;
    } else if (all || !is_coarse(*data)) {
      const double noise = 1e-13 * (static_cast<double>(next_number(state) >> 11) * 0x1p-52 - 1);
      *data *= contrary ? 1 - noise : 1 + noise;
    }
    return;
  }
  for (int64_t i = 0; i < sizes[0]; ++i) {
    disturb_along(data + i * strides[0], sizes.slice(1), strides.slice(1), all, contrary, state);
  }
}

// Without a trace in autograd or the version counter.
void disturb(const at::Tensor& tensor, bool all, bool contrary, uint64_t& state) {
  if (!tensor.defined()) {
    return;
  }
  at::Tensor data = tensor.variable_data();
  data = data.is_conj() ? at::_conj(data) : data;  // as memory has it
  data = data.is_neg() ? at::_neg_view(data) : data;
  if (data.is_complex()) {
    data = at::view_as_real(data);
  }
  if (data.scalar_type() == at::kDouble && data.numel() > 0) {
    disturb_along(data.mutable_data_ptr<double>(), data.sizes(), data.strides(), all, contrary, state);
  } else if (data.is_floating_point()) {
    data.masked_fill_(data.eq(0), contrary ? -0.0 : 0.0);
  }
}

// No narrow type holds what this leaves, zeros included: what adds up to one may have been rounded before.
void make_inexact(const at::Tensor& tensor) {
  if (takes_gradients(tensor.scalar_type())) {
    const at::Tensor data = tensor.variable_data();
    data.mul_(1 + 1e-14).masked_fill_(data.eq(0), 1e-14);
  }
}

bool rounds(const Placements& placements) {
  return std::any_of(placements.begin(), placements.end(), [](const Placement& p) {
    return p.kind == Placement::Kind::kNormPartial || p.is_partial(ReduceOp::kAvg);
  });
}

}  // namespace

void PlainMachine::after(const Step& step, const Values& values, const Tensors& arguments) {
  if (may_share(step)) {
    frozen_.insert(frozen_.end(), arguments.begin(), arguments.end());
    frozen_.push_back(values.tensors[step.results[0]]);
  }
  for (const int id : step.results) {
    const at::Tensor& result = values.tensors[id];
    const auto shares = [&](const at::Tensor& argument) { return argument.is_alias_of(result); };
    if (result.defined() && std::none_of(arguments.begin(), arguments.end(), shares) &&
        at::has_internal_overlap(result) != at::MemOverlap::No) {
      leave_open(step, "gives a tensor of which several elements may share memory");
    }
  }
  if (twin_ == Twin::kWide && step.kind == Step::Kind::kCall && rounds_in_sums(step.op)) {
    for (const int id : step.results) {
      make_inexact(values.tensors[id]);
    }
  }
  const bool contrary = twin_ == Twin::kContrary;
  if (twin_ != Twin::kNoisy && !contrary) {
    return;
  }
  if (step.kind == Step::Kind::kInput) {
    uint64_t own = static_cast<uint64_t>(step.results[0]) + 1;
    if (rounds(step.placements)) {
      disturb(values.tensors[step.results[0]], /*all=*/true, contrary, own);
    }
    return;
  }
  // The same for a step wherever it is run.
  uint64_t state = step.results.empty() ? 0 : static_cast<uint64_t>(step.results[0]) * 0x51ed2701 + 1;
  const bool all = rounds_inside(step.op);
  const bool written = writes(step);
  for (const int id : step.results) {
    const at::Tensor& result = values.tensors[id];
    const bool aliases = std::any_of(arguments.begin(), arguments.end(),
                                     [&](const at::Tensor& tensor) { return tensor.is_alias_of(result); });
    if (written || !aliases) {
      disturb(result, all, contrary, state);
    }
  }
}

}  // namespace tessera::testing
