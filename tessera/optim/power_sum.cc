#include "tessera/optim/power_sum.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <map>

namespace tessera::optim {
namespace {

constexpr int64_t kPieceElements = 1 << 16;
constexpr int kPartialSums = 8;

// Adds the terms in eight partial sums, which the compiler keeps in vector registers, then adds the partial sums in a
// fixed order.
template <class T, class Term, class Add>
double sum_terms(const T* data, int64_t n, Term term, Add add) {
  double lanes[kPartialSums] = {};
  int64_t i = 0;
  for (; i + kPartialSums <= n; i += kPartialSums) {
    for (int lane = 0; lane < kPartialSums; ++lane) {
      lanes[lane] = add(lanes[lane], term(static_cast<double>(data[i + lane])));
    }
  }
  double sum = 0;
  for (double lane : lanes) sum = add(sum, lane);
  for (; i < n; ++i) sum = add(sum, term(static_cast<double>(data[i])));
  return sum;
}

template <class T>
double sum_terms(const T* data, int64_t n, const PowerSum& power) {
  const auto plus = [](double a, double b) { return a + b; };
  const auto square = [](double x) { return x * x; };
  const auto magnitude = [](double x) { return std::fabs(x); };
  if (power.infinite()) return sum_terms(data, n, magnitude, larger);
  if (power.divisor == 1 && power.p == 2) return sum_terms(data, n, square, plus);
  if (power.divisor == 1 && power.p == 1) return sum_terms(data, n, magnitude, plus);
  return sum_terms(
      data, n, [&power](double x) { return power.term(x); }, plus);
}

// Sums the tensors in pieces of a fixed size. Threads process the pieces in any order; the sums of the pieces are added
// in the order of the tensors.
double sum_on_cpu(const std::vector<at::Tensor>& tensors, const PowerSum& power) {
  struct TensorPiece {
    size_t tensor;
    int64_t begin;
  };
  std::vector<at::Tensor> flat;
  std::vector<TensorPiece> pieces;
  for (const auto& tensor : tensors) {
    for (int64_t begin = 0; begin < tensor.numel(); begin += kPieceElements) pieces.push_back({flat.size(), begin});
    flat.push_back(tensor.contiguous());
  }
  std::vector<double> sums(pieces.size());
  at::parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const TensorPiece& piece = pieces[static_cast<size_t>(i)];
      const at::Tensor& tensor = flat[piece.tensor];
      const int64_t count = std::min(kPieceElements, tensor.numel() - piece.begin);
      AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, tensor.scalar_type(), "get_grad_norm", [&] {
        sums[static_cast<size_t>(i)] = sum_terms(tensor.const_data_ptr<scalar_t>() + piece.begin, count, power);
      });
    }
  });
  double total = 0;
  for (const double sum : sums) total = power.add(total, sum);
  return total;
}

// Computes the norms of all tensors with one foreach call and one copy to the host. Values are divided by power.divisor
// before the power is computed, so that the powers do not overflow.
double sum_on_device(const std::vector<at::Tensor>& tensors, const PowerSum& power) {
  std::vector<at::Tensor> read;
  for (const auto& tensor : tensors) {
    read.push_back(power.divisor == 1 ? tensor : tensor.to(at::kDouble).div_(power.divisor));
  }
  auto norms = at::_foreach_norm(read, power.p, at::kDouble);
  const at::Tensor all = at::stack(norms).to(at::kCPU);
  const double* values = all.const_data_ptr<double>();
  double total = 0;
  for (size_t i = 0; i < norms.size(); ++i) {
    total = power.add(total, power.infinite() ? values[i] : std::pow(values[i], power.p));
  }
  return total;
}

}  // namespace

double PowerSum::of(const std::vector<at::Tensor>& tensors) const {
  // The tensors are sorted by device, so that the host waits once per device and the order of the sums is fixed.
  std::map<c10::Device, std::vector<at::Tensor>, decltype([](c10::Device a, c10::Device b) {
             return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
           })>
      by_device;
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) by_device[tensor.device()].push_back(tensor);
  }
  double total = 0;
  for (const auto& [device, each] : by_device) {
    total = add(total, device.is_cpu() ? sum_on_cpu(each, *this) : sum_on_device(each, *this));
  }
  return total;
}

}  // namespace tessera::optim
