// A table of operations. Each operation is checked on many placements against the same operation on plain tensors.
//
//   check_cases({2, 4}, {{"mm", {{8, 12}, {12, 16}}, [](const Tensors& t) { return at::mm(t[0], t[1]); }}});
//
// Every combination of input placements is tried: replicated, each dim sharded, and Partial. The full_tensor() of the
// result and of every gradient must equal the plain one.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/dtensor/support.h"

namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

struct OpCase {
  std::string name;
  std::vector<std::vector<int64_t>> shapes;
  std::function<at::Tensor(const Tensors&)> run;
  bool positive = false;             // values in [0.5, 1.5), for roots, logarithms and divisors
  bool partial = true;               // whether Partial inputs are tried
  bool may_refuse_uneven = false;    // a view may refuse an uneven shard with its name
  bool may_refuse_in_place = false;  // a formula with in-place steps may refuse a Partial
  double tolerance = 1e-10;
};

inline at::Tensor random_tensor(const std::vector<int64_t>& shape, uint64_t seed, bool positive) {
  const auto generator = at::detail::createCPUGenerator(seed);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  return positive ? at::rand(shape, generator, options) + 0.5 : at::randn(shape, generator, options);
}

// Makes double tensors that are the same on every rank.
inline Tensors make_inputs(const OpCase& op) {
  Tensors inputs;
  for (size_t i = 0; i < op.shapes.size(); ++i) inputs.push_back(random_tensor(op.shapes[i], 17 + i, op.positive));
  return inputs;
}

// Returns a DTensor leaf whose full tensor is `whole`. Of a Partial every rank holds its share.
inline at::Tensor place(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements) {
  return distribute_tensor(whole.clone().set_requires_grad(true), mesh, placements, std::nullopt);
}

inline std::vector<Placement> placements_for(const std::vector<int64_t>& shape, bool partial) {
  std::vector<Placement> all{Replicate()};
  for (size_t dim = 0; dim < shape.size(); ++dim) all.push_back(Shard(static_cast<int64_t>(dim)));
  if (partial) all.push_back(Partial());
  return all;
}

struct Result {
  at::Tensor output;
  Tensors gradients;
};

// Returns the result and the gradients. The incoming gradient is not uniform, so that misplaced gradients show.
inline Result differentiate(const OpCase& op, const Tensors& inputs) {
  Result result;
  result.output = op.run(inputs);
  at::Tensor flow = random_tensor(result.output.sizes().vec(), 99, false);
  if (is_dtensor(result.output)) {
    flow = distribute_tensor(flow, device_mesh(result.output),
                             Placements(device_mesh(result.output)->ndim(), Replicate()), std::nullopt);
  }
  (result.output * flow).sum().backward();
  for (const auto& input : inputs) result.gradients.push_back(input.grad());
  return result;
}

inline void compare(const OpCase& op, const MeshPtr& mesh, const std::vector<Placements>& placements,
                    const Tensors& inputs, const Result& wanted) {
  std::string where = op.name + " on " + mesh->to_string();
  Tensors placed;
  for (size_t i = 0; i < inputs.size(); ++i) {
    where += " " + to_string(placements[i]);
    placed.push_back(place(inputs[i].detach(), mesh, placements[i]));
  }
  SCOPED_TRACE(where);
  try {
    const Result result = differentiate(op, placed);
    ASSERT_TRUE(is_dtensor(result.output)) << where;
    ASSERT_EQ(result.output.sizes(), wanted.output.sizes()) << where;
    EXPECT_TRUE(at::allclose(full_tensor(result.output), wanted.output, op.tolerance, op.tolerance))
        << where << '\n'
        << str(result.output) << '\n'
        << wanted.output;
    for (size_t i = 0; i < inputs.size(); ++i) {
      ASSERT_EQ(result.gradients[i].defined(), wanted.gradients[i].defined()) << where << " gradient " << i;
      if (wanted.gradients[i].defined()) {
        EXPECT_TRUE(at::allclose(full_tensor(result.gradients[i]), wanted.gradients[i], op.tolerance, op.tolerance))
            << where << " gradient " << i << '\n'
            << str(result.gradients[i]) << '\n'
            << wanted.gradients[i];
      }
    }
  } catch (const Error& error) {
    const std::string text = error.what();
    const auto says = [&](const char* part) { return text.find(part) != std::string::npos; };
    const bool uneven = says("unevenly sharded tensor") || says("cannot be performed without redistribution");
    const bool in_place = says("Sharding dimension mismatch");
    EXPECT_TRUE((op.may_refuse_uneven && uneven) || (op.may_refuse_in_place && in_place)) << where << ": " << text;
  }
}

inline Result plain_result(const OpCase& op, Tensors& inputs) {
  for (auto& input : inputs) input.set_requires_grad(true);
  return differentiate(op, inputs);
}

inline void check_all(const OpCase& op, const MeshPtr& mesh) {
  Tensors inputs = make_inputs(op);
  const Result wanted = plain_result(op, inputs);
  std::vector<std::vector<Placement>> choices;
  for (const auto& shape : op.shapes) choices.push_back(placements_for(shape, op.partial));
  std::vector<size_t> picks(inputs.size(), 0);
  for (bool more = true; more;) {
    std::vector<Placements> placements;
    for (size_t i = 0; i < picks.size(); ++i) placements.push_back({choices[i][picks[i]]});
    compare(op, mesh, placements, inputs, wanted);
    more = false;
    for (size_t i = 0; i < picks.size() && !more; ++i) {
      more = ++picks[i] < choices[i].size();
      picks[i] = more ? picks[i] : 0;
    }
  }
}

// Runs the cases on 1-d meshes of each of these numbers of ranks.
inline void check_cases(const std::vector<int>& ranks, const std::vector<OpCase>& cases) {
  for (const int size : ranks) {
    on_ranks(size, {size}, [&](const MeshPtr& mesh) {
      for (const auto& op : cases) check_all(op, mesh);
    });
  }
}

// Runs the cases on an n-d mesh, with combinations of placements that are drawn at random.
inline void check_cases_on(const std::vector<int64_t>& mesh_shape, const std::vector<OpCase>& cases, int rounds,
                           unsigned seed) {
  const int size = static_cast<int>(c10::multiply_integers(mesh_shape));
  on_ranks(size, mesh_shape, [&](const MeshPtr& mesh) {
    std::mt19937 random(seed);
    for (const auto& op : cases) {
      Tensors inputs = make_inputs(op);
      const Result wanted = plain_result(op, inputs);
      for (int round = 0; round < rounds; ++round) {
        std::vector<Placements> placements;
        for (const auto& shape : op.shapes) {
          Placements list;
          const auto choices = placements_for(shape, op.partial);
          for (int64_t m = 0; m < mesh->ndim(); ++m) list.push_back(choices[random() % choices.size()]);
          placements.push_back(std::move(list));
        }
        compare(op, mesh, placements, inputs, wanted);
      }
    }
  });
}

}  // namespace tessera::testing
