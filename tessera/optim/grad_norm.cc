#include "tessera/optim/grad_norm.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <map>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/local_part.h"

namespace tessera::optim {
namespace {

constexpr int64_t kPiece = 1 << 16;
constexpr int kLanes = 8;

double larger(double a, double b) { return a >= b || a != a ? a : b; }  // a NaN stays

// What is gathered per tensor: sum of |x|^p, or max of |x| for the infinite norm.
struct Norm {
  double p;
  bool infinite() const { return std::isinf(p); }
  double add(double a, double b) const { return infinite() ? larger(a, b) : a + b; }
};

template <class T, class Term, class Add>
double reduce_piece(const T* data, int64_t n, Term term, Add add) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = add(lanes[lane], term(static_cast<double>(data[i + lane])));
  }
  double sum = 0;
  for (double lane : lanes) sum = add(sum, lane);
  for (; i < n; ++i) sum = add(sum, term(static_cast<double>(data[i])));
  return sum;
}

template <class T>
double reduce_piece(const T* data, int64_t n, const Norm& norm) {
  const auto plus = [](double a, double b) { return a + b; };
  if (norm.p == 2)
    return reduce_piece(
        data, n, [](double x) { return x * x; }, plus);
  if (norm.p == 1)
    return reduce_piece(
        data, n, [](double x) { return std::fabs(x); }, plus);
  if (norm.infinite()) {
    return reduce_piece(
        data, n, [](double x) { return std::fabs(x); }, larger);
  }
  return reduce_piece(
      data, n, [p = norm.p](double x) { return std::pow(std::fabs(x), p); }, plus);
}

// In pieces of fixed size, so that the number of threads does not show in the result.
double reduce_local(const at::Tensor& tensor, const Norm& norm) {
  if (tensor.numel() == 0) return 0;
  if (!tensor.device().is_cpu()) {
    const double value = at::linalg_vector_norm(tensor, norm.p, std::nullopt, false, at::kDouble).item<double>();
    return norm.infinite() ? value : std::pow(value, norm.p);
  }
  const at::Tensor flat = tensor.contiguous();
  std::vector<double> pieces(static_cast<size_t>((flat.numel() + kPiece - 1) / kPiece));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, flat.scalar_type(), "get_grad_norm", [&] {
    const auto* data = flat.const_data_ptr<scalar_t>();
    at::parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t offset = i * kPiece;
        pieces[static_cast<size_t>(i)] = reduce_piece(data + offset, std::min(kPiece, flat.numel() - offset), norm);
      }
    });
  });
  double sum = 0;
  for (double piece : pieces) sum = norm.add(sum, piece);
  return sum;
}

// What the gradients on one mesh add up to here, by the set of mesh dims that shard them (a bit each).
struct MeshSums {
  MeshPtr mesh;
  std::map<uint64_t, double> sums;
};

// Replaces sums of this rank by those over the mesh. All ranks of a mesh hold the same keys: gradients are DTensors
// with the same placements on all.
void reduce_over_mesh(MeshSums& part, const Norm& norm) {
  const auto count = static_cast<int64_t>(part.sums.size());
  for (int64_t dim = 0; dim < part.mesh->ndim(); ++dim) {
    const int64_t size = part.mesh->size(dim);
    if (size == 1) continue;
    at::Tensor own = at::empty({count}, at::kDouble);
    int64_t i = 0;
    for (const auto& [key, sum] : part.sums) own.mutable_data_ptr<double>()[i++] = sum;
    own = own.to(part.mesh->device());
    at::Tensor all = at::empty({size * count}, own.options());
    comm::all_gather_into(*part.mesh->group(dim), all, own, "gradient norm").wait();
    all = all.to(at::kCPU);
    const double* values = all.const_data_ptr<double>();
    i = 0;
    for (auto& [key, sum] : part.sums) {
      sum = values[i];  // rank 0 speaks for replicas
      for (int64_t rank = 1; rank < size && (key >> dim & 1) != 0; ++rank)
        sum = norm.add(sum, values[rank * count + i]);
      ++i;
    }
  }
}

Placements without_partial(Placements placements) {
  for (auto& placement : placements) {
    if (placement.is_partial()) placement = Replicate();
  }
  return placements;
}

}  // namespace

double get_grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  TESSERA_CHECK(norm_type > 0, ErrorKind::kConfig,
                "[optim.grad_norm] norm type: found {}, wanted a positive number or infinity", norm_type);
  c10::NoGradGuard no_grad;
  const Norm norm{norm_type};
  double total = 0;
  std::vector<MeshSums> meshes;  // in the order of the parameters, which is the same on all ranks
  for (const auto& parameter : parameters) {
    at::Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    if (!is_dtensor(gradient)) {
      total = norm.add(total, reduce_local(gradient, norm));
      continue;
    }
    const Placements wanted = without_partial(placements(gradient));
    if (wanted != placements(gradient)) gradient = redistribute(gradient, wanted);
    const MeshPtr& mesh = device_mesh(gradient);
    auto part = std::find_if(meshes.begin(), meshes.end(), [&](const MeshSums& other) { return *other.mesh == *mesh; });
    if (part == meshes.end()) part = meshes.insert(meshes.end(), {mesh, {}});
    uint64_t key = 0;
    for (size_t dim = 0; dim < wanted.size(); ++dim) key |= static_cast<uint64_t>(!wanted[dim].is_replicate()) << dim;
    double& sum = part->sums[key];
    sum = norm.add(sum, reduce_local(to_local(gradient), norm));
  }
  for (auto& part : meshes) {
    reduce_over_mesh(part, norm);
    for (const auto& [key, sum] : part.sums) total = norm.add(total, sum);
  }
  return norm.infinite() ? total : std::pow(total, 1.0 / norm.p);
}

void clip_grad_by_total_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double total_norm) {
  if (!std::isfinite(total_norm)) return;
  const double factor = max_norm / (total_norm + 1e-6);
  if (factor >= 1) return;
  c10::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) local_part(parameter.grad()).mul_(factor);
  }
}

double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  const double total = get_grad_norm(parameters, norm_type);
  clip_grad_by_total_norm_(parameters, max_norm, total);
  return total;
}

}  // namespace tessera::optim
