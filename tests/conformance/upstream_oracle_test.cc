// Tests the values of DTensors against PyTorch's own DTensor, which runs the same arguments and placements on two
// ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/conformance/samples_json.h"
#include "tests/conformance/suite.h"
#include "tests/dtensor/support.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

using Values = std::vector<std::vector<double>>;

std::vector<double> flat(const at::Tensor& tensor) {
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
  const at::Tensor some = real.to(at::kDouble);
  const at::Tensor wide = at::where(at::isfinite(some), some, std::numeric_limits<double>::quiet_NaN()).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()};
}

// Returns our values; none if the operation refuses with one of the allowed texts.
std::optional<Values> values_of(const SharedSample& sample, const Combination& combination, const MeshPtr& mesh) {
  try {
    Tensors placed;
    for (size_t i = 0; i < sample.slots.size(); ++i) {
      placed.push_back(place(sample.slots[i].plain, mesh, {combination[i]}));
    }
    const Outcome outcome =
        call(sample.reference->sample, {}, with_tensors(sample.reference->sample, sample.slots, placed));
    Values values;
    for (const auto& tensor : outcome.tensors) {
      if (tensor.defined()) values.push_back(flat(is_dtensor(tensor) ? full_tensor(tensor) : tensor));
    }
    return values;
  } catch (const std::exception& error) {
    if (!sample.reference->may_refuse(error.what())) throw;
    return std::nullopt;
  }
}

bool close(const Values& a, const Values& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    const auto left = at::tensor(a[i], at::kDouble);
    const auto right = at::tensor(b[i], at::kDouble);
    if (left.sizes() != right.sizes() || !at::allclose(left, right, 1e-6, 1e-6, /*equal_nan=*/true)) return false;
  }
  return true;
}

TEST(PyTorchDTensor, GivesTheSameValues) {
  const TempFolder folder;
  const auto samples = value_samples();
  const std::string given = (folder.path() / "samples.json").string();
  const std::string found = (folder.path() / "results.json").string();
  write_samples(samples, given);
  const auto run = run_python("tests/conformance/oracle/upstream_values.py", {given, found}, {.timeout_seconds = 500});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto theirs = nlohmann::json::parse(std::ifstream(found));
  int alike = 0;
  int not_there = 0;
  int not_here = 0;
  std::map<std::string, int> different;  // by operation
  on_ranks(2, {2}, [&](const MeshPtr& mesh) {
    const at::NoGradGuard no_grad;
    const bool first = (*mesh->coordinate())[0] == 0;
    for (size_t i = 0; i < samples.size(); ++i) {
      for (size_t j = 0; j < samples[i].placements.size(); ++j) {
        const auto ours = values_of(samples[i], samples[i].placements[j], mesh);
        if (!first) continue;
        const auto& reference = theirs.at(i).at(j);
        not_there += reference.is_null();
        not_here += !ours;
        if (ours && !reference.is_null()) {
          Values wanted;
          for (const auto& values : reference) {
            wanted.push_back({});
            for (const auto& value : values) {
              wanted.back().push_back(value.is_number() ? value.get<double>()
                                                        : std::numeric_limits<double>::quiet_NaN());
            }
          }
          const bool same = close(*ours, wanted);
          alike += same;
          if (!same) {
            const std::string name = samples[i].name();
            ++different[name.substr(0, name.find('#'))];
          }
        }
      }
    }
  });
  // A case is different if our value equals the plain operation's, to which the conformance tests compare, and the
  // value of PyTorch's DTensor does not.
  std::string summary =
      fmt::format("{} pairs of operation and placements alike, {} that PyTorch does not do, {} refused", alike,
                  not_there, not_here);
  for (const auto& [op, count] : different) summary += fmt::format(", {} of {} different", count, op);
  expect_counted("upstream", summary);
}

}  // namespace
}  // namespace tessera::testing
