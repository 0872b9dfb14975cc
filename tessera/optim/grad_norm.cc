#include "tessera/optim/grad_norm.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/redistribute/autograd.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/nn/module.h"
#include "tessera/optim/detail/mesh_dims.h"
#include "tessera/optim/detail/model_parameters.h"
#include "tessera/optim/power_sum.h"

namespace tessera::optim {
namespace {

// Replaces `value` by its sum over the ranks of the group, added in rank order. The number is on the host, so the group
// must support CPU tensors.
void sum_over_group(comm::Group& group, const PowerSum& power, double& value) {
  if (group.size() == 1) return;
  at::Tensor own = at::empty({1}, at::kDouble);
  own.mutable_data_ptr<double>()[0] = value;
  at::Tensor all = at::empty({group.size()}, at::kDouble);
  comm::all_gather_into(group, all, own, "gradient norm").wait();
  const double* values = all.const_data_ptr<double>();
  value = values[0];
  for (int rank = 1; rank < group.size(); ++rank) value = power.add(value, values[rank]);
}

// Computes sums of squares on one accelerator; the host does not wait for them. An undefined tensor means a sum over no
// elements.
struct SquaresOnDevice {
  c10::Device device;

  at::Tensor of(const std::vector<at::Tensor>& tensors) const {
    std::vector<at::Tensor> read;
    for (const auto& tensor : tensors) {
      if (tensor.numel() > 0) read.push_back(tensor);
    }
    if (read.empty()) return {};
    return at::stack(at::_foreach_norm(read, 2, at::kDouble)).square_().sum();
  }
  at::Tensor add(const at::Tensor& a, const at::Tensor& b) const {
    return a.defined() && b.defined() ? a + b : (a.defined() ? a : b);
  }
  at::Tensor number(const at::Tensor& sum) const {
    return sum.defined() ? sum : at::zeros({}, at::TensorOptions(device).dtype(at::kDouble));
  }
};

void sum_over_group(comm::Group& group, const SquaresOnDevice& squares, at::Tensor& value) {
  if (group.size() == 1) return;
  const auto own = squares.number(value).view({1});
  const auto all = at::empty({group.size()}, own.options());
  comm::all_gather_into(group, all, own, "gradient norm").wait();
  value = all.sum();
}

// The gradients that this rank adds to the norm, grouped by mesh, because their sums are reduced over dims of this
// mesh. `plain` and `plain_experts` are for plain tensors. Counted is a list of gradients, or a sum computed from such
// a list.
template <class Counted>
struct SumsByMesh {
  struct OnMesh {
    MeshPtr mesh;
    bool local_experts;
    Counted counted{};
  };
  Counted plain{};
  Counted plain_experts{};          // of experts that only this rank holds
  std::vector<OnMesh> on_meshes{};  // each mesh once (twice with experts), in parameter order

  Counted& on(const MeshPtr& mesh, bool local_experts) {
    const auto is_its = [&](const OnMesh& other) {
      return other.local_experts == local_experts && *other.mesh == *mesh;
    };
    auto at = std::ranges::find_if(on_meshes, is_its);
    if (at == on_meshes.end()) at = on_meshes.insert(at, {mesh, local_experts});
    return at->counted;
  }
};

using Gradients = SumsByMesh<std::vector<at::Tensor>>;

// Returns whether this rank adds a gradient with these placements to the norm. Of several replicas, only the rank with
// coordinate 0 in all replicated mesh dims adds it.
bool counts_on_this_rank(const DeviceMesh& mesh, const Placements& placements) {
  for (size_t dim = 0; dim < placements.size(); ++dim) {
    if (placements[dim].is_replicate() && mesh.local_rank(static_cast<int64_t>(dim)) != 0) return false;
  }
  return true;
}

// Sorts the gradients by mesh and all-reduces Partial ones. The mesh of a parameter is listed even if the parameter has
// no gradient, so that all ranks list the same meshes in the same order. COLLECTIVE over the meshes of Partial
// gradients.
Gradients group_by_mesh(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& local_experts = {}) {
  std::unordered_set<const c10::TensorImpl*> experts;
  for (const auto& parameter : local_experts) experts.insert(parameter.unsafeGetTensorImpl());
  Gradients found;
  for (const auto& parameter : parameters) {
    at::Tensor gradient = parameter.grad();
    const bool expert = experts.contains(parameter.unsafeGetTensorImpl());
    const at::Tensor& gradient_or_parameter = gradient.defined() ? gradient : parameter;
    if (!is_dtensor(gradient_or_parameter)) {
      if (gradient.defined()) (expert ? found.plain_experts : found.plain).push_back(gradient);
      continue;
    }
    const MeshPtr mesh = device_mesh(gradient_or_parameter);
    auto& parts = found.on(mesh, expert);
    if (!gradient.defined()) continue;
    // A norm is not linear, so Partial gradients are all-reduced before it is computed.
    const Placements complete = tessera::partial_to_replicated(placements(gradient));
    gradient = redistribute(gradient, complete);
    if (mesh->coordinate() && counts_on_this_rank(*mesh, complete)) parts.push_back(to_local(gradient));
  }
  return found;
}

// The groups over which sums are reduced, besides the own mesh of each DTensor. dp_cp and tp: for plain gradients,
// except those of local experts; null: plain gradients are equal on all ranks. ep: the expert-parallel mesh, for the
// gradients of local experts, each of which only one rank of this mesh holds; null: there are no local experts.
struct ShardGroups {
  comm::Group* dp_cp = nullptr;
  comm::Group* tp = nullptr;
  const DeviceMesh* ep = nullptr;
};

// Returns one sum for each list of this rank's gradients in `gradients`: of |x|^p (for the infinity norm the largest
// |x|) with PowerSum, of squares with SquaresOnDevice. The sums of PowerSum are numbers on the host; those of
// SquaresOnDevice are tensors on the device.
template <class Power>
auto local_sums(const Gradients& gradients, const Power& power) {
  SumsByMesh<decltype(power.of(gradients.plain))> sums{power.of(gradients.plain), power.of(gradients.plain_experts)};
  for (const auto& [mesh, local_experts, parts] : gradients.on_meshes) {
    sums.on_meshes.push_back({mesh, local_experts, power.of(parts)});
  }
  return sums;
}

// Returns the sum of |x|^p, or the largest |x|, over all ranks. The sum of plain gradients is reduced over dp_cp and
// tp. Then, for each mesh, the sum of the DTensor gradients on this mesh is reduced over the dims of the mesh. Finally
// the sum of local experts is reduced over ep. All ranks run the collectives in this order.
template <class Number, class Power>
Number sum_over_ranks(SumsByMesh<Number> sums, const ShardGroups& groups, const Power& power) {
  Number total = std::move(sums.plain), experts = std::move(sums.plain_experts);
  for (auto* group : {groups.dp_cp, groups.tp}) {
    if (group != nullptr) sum_over_group(*group, power, total);
  }
  for (auto& [mesh, local_experts, sum] : sums.on_meshes) {
    if (!mesh->coordinate()) continue;
    for (int64_t dim = 0; dim < mesh->ndim(); ++dim) sum_over_group(*mesh->group(dim), power, sum);
    auto& part = local_experts ? experts : total;
    part = power.add(part, sum);
  }
  if (groups.ep != nullptr) sum_over_group(*groups.ep->group(0), power, experts);
  return power.add(total, experts);
}

template <class Power>
auto sum_of_all(const Gradients& gradients, const ShardGroups& groups, const Power& power) {
  return sum_over_ranks(local_sums(gradients, power), groups, power);
}

// Returns the accelerator that holds all trainable parameters. Returns nullopt if a parameter is on the CPU, is on
// another device than the others, or has 64 bits per element. Parameters without a gradient are examined, too, so that
// the result does not depend on which parameters have a gradient on this rank.
std::optional<c10::Device> accelerator_of(const std::vector<at::Tensor>& parameters) {
  std::optional<c10::Device> found;
  for (const auto& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    const auto device = local_tensor_of(parameter).device();
    if (device.is_cpu() || parameter.element_size() > 4 || (found && *found != device)) return std::nullopt;
    found = device;
  }
  return found;
}

void check_norm_type(double norm_type) {
  TESSERA_CHECK(norm_type > 0, ErrorKind::kConfig,
                "[optim.grad_norm] norm type: found {}, wanted a positive number or infinity", norm_type);
}

void check_sum_dtype(at::ScalarType dtype) {
  TESSERA_CHECK(dtype == at::kFloat || dtype == at::kDouble, ErrorKind::kConfig,
                "[optim.grad_norm] dtype: found {}, wanted float32 or float64. Gradients of any dtype are supported.",
                c10::toString(dtype));
}

double norm_of(const std::vector<at::Tensor>& parameters, const ShardGroups& groups, double norm_type,
               const std::vector<at::Tensor>& local_experts = {}) {
  c10::NoGradGuard no_grad;
  // norm_of_sums() may call sum_of_all() up to three times. group_by_mesh() is called before, so that Partial gradients
  // are all-reduced only once.
  const Gradients gradients = group_by_mesh(parameters, local_experts);
  return norm_of_sums(norm_type, [&](const PowerSum& power) { return sum_of_all(gradients, groups, power); });
}

// Returns whether the ranks of `group` that are in the mesh are exactly the ranks along some dims of the mesh; true if
// no rank of `group` is in the mesh. Sets `whole` to whether all ranks of the group are in the mesh.
bool spans_mesh_dims(const comm::Group& group, const DeviceMesh& mesh, bool& whole) {
  const auto shared = std::ranges::count_if(
      group.ranks(), [&](int rank) { return std::ranges::find(mesh.ranks(), rank) != mesh.ranks().end(); });
  whole = shared == group.size();
  int64_t along = 1;
  for (const int64_t dim : detail::dims_along(mesh, group)) along *= mesh.size(dim);
  return shared == 0 || along == shared;
}

// Raises kShape in two cases: the ranks that the group shares with one of `meshes` are not exactly the ranks along some
// dims of this mesh, or no mesh contains all ranks of the group. Meshes without this rank are not checked; if there are
// no others, every group passes. A group of one rank always passes.
void check_group(const comm::Group& group, const std::vector<MeshPtr>& meshes, const char* name) {
  bool found = group.size() == 1;
  std::string seen;
  for (const auto& mesh : meshes) {
    if (!mesh->coordinate()) continue;
    bool whole = false;
    TESSERA_CHECK(spans_mesh_dims(group, *mesh, whole), ErrorKind::kShape,
                  "[optim.get_grad_norm] {}: found '{}' of {} ranks, which crosses the dims of {}, the mesh of a "
                  "gradient; wanted one of its dims, or several flattened",
                  name, group.name(), group.size(), mesh->to_string());
    found = found || whole;
    seen += (seen.empty() ? "" : ", ") + mesh->to_string();
  }
  TESSERA_CHECK(found || seen.empty(), ErrorKind::kShape,
                "[optim.get_grad_norm] {}: found '{}' of {} ranks, wanted a dim, or several dims flattened, of {}, on "
                "which gradients are. Pass a group of their mesh, or call get_grad_norm without groups.",
                name, group.name(), group.size(), seen);
}

// Scales each gradient in its own dtype. factor: a number, or a scalar tensor on the gradients' device.
template <class Factor>
void scale_gradients(const std::vector<at::Tensor>& parameters, const Factor& factor) {
  c10::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;  // one kernel call per dtype
  for (const auto& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    const at::Tensor part = local_tensor_of(parameter.grad());
    if (part.numel() > 0) by_dtype[part.scalar_type()].push_back(part);
  }
  for (const auto& [dtype, parts] : by_dtype) at::_foreach_mul_(parts, factor);
}

}  // namespace

double get_grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  check_norm_type(norm_type);
  return norm_of(parameters, {}, norm_type);
}

double get_grad_norm(const std::vector<at::Tensor>& parameters, comm::Group& dp_cp_group, comm::Group& tp_group,
                     double norm_type, at::ScalarType dtype) {
  check_norm_type(norm_type);
  check_sum_dtype(dtype);
  std::vector<MeshPtr> meshes;
  ShardGroups groups{.dp_cp = &dp_cp_group, .tp = &tp_group};
  for (const auto& parameter : parameters) {
    if (is_dtensor(parameter)) meshes.push_back(device_mesh(parameter));
  }
  check_group(dp_cp_group, meshes, "dp_cp_group");
  check_group(tp_group, meshes, "tp_group");
  return norm_of(parameters, groups, norm_type);
}

at::Tensor grad_norm_tensor(const std::vector<at::Tensor>& parameters) {
  c10::NoGradGuard no_grad;
  if (const auto device = accelerator_of(parameters)) {
    const SquaresOnDevice squares{*device};
    return squares.number(sum_of_all(group_by_mesh(parameters), {}, squares)).sqrt();
  }
  return at::scalar_tensor(norm_of(parameters, {}, 2), at::kDouble);
}

namespace {

// Adds each sum in `more` to the sum of the same kind in `sums`: the sum of plain gradients, and for each mesh the sum
// of the DTensor gradients on this mesh. A mesh that `sums` does not list yet is added to the list. plain_experts is
// not added, because GradNormAccumulator has no local experts.
template <class Number, class Power>
void add_sums(SumsByMesh<Number>& sums, const SumsByMesh<Number>& more, const Power& power) {
  sums.plain = power.add(sums.plain, more.plain);
  for (const auto& [mesh, local_experts, more_sum] : more.on_meshes) {
    Number& sum = sums.on(mesh, local_experts);
    sum = power.add(sum, more_sum);
  }
}

}  // namespace

struct GradNormAccumulator::Impl {
  std::vector<at::Tensor> parameters;
  std::optional<c10::Device> device;
  SumsByMesh<double> on_host{};
  SumsByMesh<at::Tensor> on_device{};
};

GradNormAccumulator::GradNormAccumulator(std::vector<at::Tensor> parameters) : impl_(std::make_unique<Impl>()) {
  impl_->device = accelerator_of(parameters);
  impl_->parameters = std::move(parameters);
}

GradNormAccumulator::~GradNormAccumulator() = default;

void GradNormAccumulator::add(const std::vector<at::Tensor>& parameters) {
  c10::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined() || !is_dtensor(gradient)) continue;
    TESSERA_CHECK(
        placements(gradient) == placements(parameter), ErrorKind::kShape,
        "[optim.grad_norm] found a gradient with placements {} and a parameter with placements {}, wanted the "
        "same, because another placement needs communication. Redistribute the gradient.",
        to_string(placements(gradient)), to_string(placements(parameter)));
  }
  const Gradients gradients = group_by_mesh(parameters);
  if (impl_->device) {
    const SquaresOnDevice squares{*impl_->device};
    add_sums(impl_->on_device, local_sums(gradients, squares), squares);
  } else {
    const PowerSum squares{.p = 2};
    add_sums(impl_->on_host, local_sums(gradients, squares), squares);
  }
}

at::Tensor GradNormAccumulator::norm() {
  c10::NoGradGuard no_grad;
  const Gradients remaining_gradients = group_by_mesh(impl_->parameters);  // includes all meshes, in parameter order
  // Adds the sums of earlier add() calls to the sums of the gradients that exist now, then reduces each sum over the
  // ranks once.
  const auto sum_with = [&](auto& added, const auto& squares) {
    auto sums = local_sums(remaining_gradients, squares);
    add_sums(sums, std::exchange(added, {}), squares);
    return sum_over_ranks(std::move(sums), {}, squares);
  };
  if (impl_->device) {
    const SquaresOnDevice squares{*impl_->device};
    return squares.number(sum_with(impl_->on_device, squares)).sqrt();
  }
  return at::scalar_tensor(std::sqrt(sum_with(impl_->on_host, PowerSum{.p = 2})), at::kDouble);
}

void clip_grad_by_total_norm_(const std::vector<at::Tensor>& parameters, double max_grad_norm,
                              const at::Tensor& total_norm) {
  c10::NoGradGuard no_grad;
  scale_gradients(parameters, at::reciprocal(total_norm + 1e-6).mul_(max_grad_norm).clamp_max_(1));
}

void clip_grad_by_total_norm_(const std::vector<at::Tensor>& parameters, double max_grad_norm, double total_norm,
                              at::ScalarType dtype) {
  check_sum_dtype(dtype);
  const double factor = max_grad_norm / (total_norm + 1e-6);
  if (factor < 1) scale_gradients(parameters, factor);
}

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm, const ClipGradNormOptions& options) {
  check_norm_type(options.norm_type);
  ShardGroups groups;
  if (options.ep_mesh && !options.ep_parameters.empty()) {
    const auto& mesh = *options.ep_mesh;
    TESSERA_CHECK(mesh.ndim() == 1 && mesh.coordinate(), ErrorKind::kShape,
                  "[optim.clip_grad_norm] ep_mesh: found {} on rank {}, wanted one dim that holds this rank",
                  mesh.to_string(), mesh.rank());
    groups.ep = &mesh;
  }
  double total = norm_of(parameters, groups, options.norm_type,
                         groups.ep != nullptr ? options.ep_parameters : std::vector<at::Tensor>{});
  // The norm over all pipeline stages is the norm of the stages' norms. If the sum of the powers of the stages' norms
  // overflows or loses digits, norm_of_sums() computes the sum again relative to the largest of these norms.
  if (options.pp_mesh) {
    const auto& mesh = *options.pp_mesh;
    TESSERA_CHECK(mesh.ndim() == 1, ErrorKind::kShape, "[optim.clip_grad_norm] pp_mesh: found {}, wanted one dim",
                  mesh.to_string());
    const double own = total;
    total = norm_of_sums(options.norm_type, [&](const PowerSum& power) {
      double sum = power.term(own);
      sum_over_group(*mesh.group(0), power, sum);
      return sum;
    });
  }
  TESSERA_CHECK(!options.error_if_nonfinite || std::isfinite(total), ErrorKind::kInternal,
                "[optim.clip_grad_norm] found a gradient norm of order {} of {}, wanted a finite norm for clipping",
                options.norm_type, total);
  const double factor = max_norm / (total + 1e-6);
  // The condition is not `factor < 1`, which is false for NaN: a NaN factor must make all gradients NaN.
  if (!(factor >= 1)) scale_gradients(parameters, factor);
  return total;
}

double clip_grad_norm(std::optional<double> max_grad_norm, const std::vector<nn::Module*>& model_parts,
                      const ModelClipOptions& options) {
  if (!max_grad_norm) return 0;
  TESSERA_CHECK(!options.pp_enabled || !options.pp_axis_name.empty(), ErrorKind::kConfig,
                "[optim.clip_grad_norm] pp_axis_name must be provided when pp_enabled is true");
  // If there are several expert-parallel ranks, the norm's sums over the gradients of local experts (experts that only
  // one of these ranks holds) are also reduced over these ranks.
  const auto& moe = options.moe_mesh;
  const bool over_experts = moe && moe->has_dim(options.ep_axis_name) && moe->coordinate() &&
                            moe->size(moe->dim_of(options.ep_axis_name)) > 1;
  std::vector<at::Tensor> parameters, experts;
  for (const auto& parameter : detail::model_parameters(model_parts)) {
    if (!parameter.tensor.requires_grad()) continue;
    parameters.push_back(parameter.tensor);
    const bool placed = is_dtensor(parameter.tensor) && device_mesh(parameter.tensor)->has_dim(options.ep_axis_name);
    if (over_experts && parameter.local_expert && !placed) experts.push_back(parameter.tensor);
  }
  const bool staged = options.pp_enabled && options.device_mesh;
  return clip_grad_norm(parameters, *max_grad_norm,
                        {.norm_type = options.norm_type,
                         .pp_mesh = staged ? options.device_mesh->slice({options.pp_axis_name}) : nullptr,
                         .ep_mesh = over_experts ? moe->slice({options.ep_axis_name}) : nullptr,
                         .ep_parameters = std::move(experts)});
}

}  // namespace tessera::optim
