// Tests every sharding rule against the plain operation: results and gradients for all placements, with even and uneven
// sizes.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/dtensor/op_cases.h"

namespace tessera {
namespace {

using testing::check_cases;
using testing::check_cases_on;
using testing::OpCase;
using testing::Tensors;

std::vector<OpCase> pointwise_cases(int64_t rows) {
  const std::vector<int64_t> a{rows, 6};
  return {
      {"add", {a, a}, [](const Tensors& t) { return t[0] + t[1]; }},
      {"add alpha broadcast", {a, {6}}, [](const Tensors& t) { return at::sub(t[0], t[1], 2); }},
      {"add number", {a}, [](const Tensors& t) { return t[0] + 1; }},
      {"mul", {a, a}, [](const Tensors& t) { return t[0] * t[1]; }},
      {"mul column", {a, {rows, 1}}, [](const Tensors& t) { return t[0] * t[1] * 3; }},
      {"div", {a, a}, [](const Tensors& t) { return t[0] / t[1]; }, true},
      {"neg exp", {a}, [](const Tensors& t) { return (-t[0]).exp(); }},
      {"pow rsqrt", {a}, [](const Tensors& t) { return t[0].pow(2).rsqrt(); }, true},
      {"silu sigmoid tanh relu",
       {a},
       [](const Tensors& t) { return at::silu(t[0]) + t[0].sigmoid() * t[0].tanh() + t[0].relu(); }},
      {"gelu log", {a}, [](const Tensors& t) { return at::gelu(t[0]) + t[0].log(); }, true},
      {"where", {a, a}, [](const Tensors& t) { return at::where(t[0] > t[1], t[0], t[1] * 2); }},
      {"maximum", {a, a}, [](const Tensors& t) { return at::maximum(t[0], t[1]); }},
      {"masked_fill", {a, a}, [](const Tensors& t) { return t[0].masked_fill(t[1] > 0, 4.0); }},
      {"clone detach cast",
       {a},
       [](const Tensors& t) { return t[0].clone().to(at::kFloat).to(at::kDouble) + t[0].detach(); },
       false,
       true,
       false,
       false,
       1e-6},
      {"lerp addcmul",
       {a, a},
       [](const Tensors& t) { return at::lerp(t[0], t[1], 0.3) + at::addcmul(t[0], t[0], t[1], 2); }},
      {"clamp", {a}, [](const Tensors& t) { return t[0].clamp(-0.5, 0.5); }},
  };
}

// Row counts around the number of ranks: zero, one, fewer, more, and uneven.
void check_row_counts(std::vector<OpCase> (*cases)(int64_t)) {
  for (const int64_t rows : {0, 1, 3, 4}) check_cases({2}, cases(rows));
  for (const int64_t rows : {3, 9}) check_cases({4}, cases(rows));
}

TEST(Pointwise, EqualsThePlainOperationOnAllPlacements) { check_row_counts(pointwise_cases); }

std::vector<OpCase> matmul_cases(int64_t m) {
  return {
      {"mm", {{m, 6}, {6, 5}}, [](const Tensors& t) { return at::mm(t[0], t[1]); }},
      {"mm of transposed", {{6, m}, {5, 6}}, [](const Tensors& t) { return at::mm(t[0].t(), t[1].t()); }},
      {"addmm", {{5}, {m, 6}, {6, 5}}, [](const Tensors& t) { return at::addmm(t[0], t[1], t[2], 2, 3); }},
      {"bmm", {{4, m, 6}, {4, 6, 5}}, [](const Tensors& t) { return at::bmm(t[0], t[1]); }},
      {"linear 2-d", {{m, 6}, {5, 6}, {5}}, [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }},
      {"mv dot", {{m, 6}, {6}}, [](const Tensors& t) { return at::mv(t[0], t[1]) * at::dot(t[1], t[1]); }},
  };
}

TEST(Matmul, EqualsThePlainOperationOnAllPlacements) { check_row_counts(matmul_cases); }

TEST(Matmul, LinearOverBatchesKeepsSequenceShards) {
  std::vector<OpCase> cases;
  for (const int64_t batch : {1, 4, 5}) {
    for (const int64_t sequence : {3, 8}) {
      cases.push_back({"linear 3-d",
                       {{batch, sequence, 6}, {4, 6}},
                       [](const Tensors& t) { return at::linear(t[0], t[1]); },
                       false,
                       false,
                       true});
      cases.push_back({"matmul 3-d",
                       {{batch, sequence, 6}, {6, 4}},
                       [](const Tensors& t) { return at::matmul(t[0], t[1]); },
                       false,
                       true,
                       true});
      cases.push_back({"linear 3-d bias",
                       {{batch, sequence, 6}, {4, 6}, {4}},
                       [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); },
                       false,
                       false,
                       true});
    }
  }
  check_cases({2}, cases);
  check_cases({4}, {cases[0], cases[6], cases[9]});
}

std::vector<OpCase> reduction_cases(int64_t rows) {
  const std::vector<int64_t> a{rows, 6, 5};
  std::vector<OpCase> cases = {
      {"sum", {a}, [](const Tensors& t) { return t[0].sum(); }},
      {"sum dims",
       {a},
       [](const Tensors& t) {
         return t[0].sum({0, -1}) + t[0].sum({0, 2}, true).view({6});
       }},
      {"linalg_vector_norm",
       {a},
       [](const Tensors& t) { return at::linalg_vector_norm(t[0], 2, {at::IntArrayRef{1}}, true); },
       true,
       true,
       false,
       true},
      {"norm 1 and 3",
       {a},
       [](const Tensors& t) { return at::linalg_vector_norm(t[0], 1) + at::linalg_vector_norm(t[0], 3); },
       true},
  };
  if (rows > 0) {
    cases.push_back({"mean", {a}, [](const Tensors& t) { return t[0].mean(); }});
    cases.push_back(
        {"mean dim", {a}, [](const Tensors& t) { return t[0].mean(at::IntArrayRef{0}) * t[0].mean(-1, true); }});
    cases.push_back({"max min", {a}, [](const Tensors& t) { return t[0].max() + t[0].min(); }});
    cases.push_back({"amax amin", {a}, [](const Tensors& t) {
                       return at::amax(t[0], {1}) - at::amin(t[0], {0, 1}, true).squeeze(0);
                     }});
    cases.push_back({"max dim", {a}, [](const Tensors& t) { return std::get<0>(t[0].max(1)); }});
    cases.push_back({"prod", {a}, [](const Tensors& t) { return t[0].prod(1); }, true});
    cases.push_back({"var", {a}, [](const Tensors& t) { return t[0].var(at::IntArrayRef{1}); }});
    cases.push_back({"norm inf", {a}, [](const Tensors& t) {
                       return at::linalg_vector_norm(t[0], std::numeric_limits<double>::infinity());
                     }});
    cases.push_back({"logsumexp", {a}, [](const Tensors& t) { return at::logsumexp(t[0], {1}); }});
  }
  return cases;
}

TEST(Reduction, EqualsThePlainOperationOnAllPlacements) { check_row_counts(reduction_cases); }

std::vector<OpCase> view_cases(int64_t rows) {
  const std::vector<int64_t> a{rows, 4, 6};
  return {
      {"view flatten",
       {a},
       [=](const Tensors& t) {
         return t[0].view({rows * 4, 6}) * 2;
       },
       false,
       true,
       true},
      {"view flatten inner",
       {a},
       [=](const Tensors& t) {
         return t[0].view({rows, 24}) * 2;
       },
       false,
       true,
       true},
      {"view there and back",
       {a},
       [=](const Tensors& t) {
         return (t[0].view({rows * 4, 6}) * 2).view({rows, 4, 6});
       },
       false,
       true,
       true},
      {"view split",
       {a},
       [=](const Tensors& t) {
         return t[0].view({rows, 4, 2, 3});
       },
       false,
       true,
       true},
      {"view ones",
       {a},
       [=](const Tensors& t) {
         return t[0].view({1, rows, 1, 4, 6, 1});
       },
       false,
       true,
       true},
      {"reshape of transposed",
       {a},
       [=](const Tensors& t) {
         return t[0].transpose(1, 2).reshape({rows, 24});
       },
       false,
       true,
       true},
      {"flatten all", {a}, [](const Tensors& t) { return t[0].flatten() + 0; }, false, true, true},
      {"heads",
       {a},
       [=](const Tensors& t) {
         return t[0].view({rows, 4, 2, 3}).transpose(1, 2).transpose(1, 2).reshape({rows, 4, 6});
       },
       false,
       true,
       true},
  };
}

std::vector<OpCase> dims_cases(int64_t rows) {
  const std::vector<int64_t> a{rows, 4, 6};
  std::vector<OpCase> cases = {
      {"permute transpose",
       {a},
       [](const Tensors& t) {
         return t[0].permute({2, 0, 1}).transpose(0, 1).contiguous();
       }},
      {"unsqueeze expand",
       {a},
       [=](const Tensors& t) {
         return t[0].unsqueeze(1).expand({rows, 3, 4, 6});
       }},
      {"squeeze", {{rows, 1, 6}}, [](const Tensors& t) { return t[0].squeeze(1) * 2; }, false, true, true},
      {"slice", {a}, [](const Tensors& t) { return t[0].slice(0, 1, 3).slice(2, 0, 6, 2); }},
      {"narrow step", {a}, [](const Tensors& t) { return t[0].narrow(1, 1, 2); }},
      {"split",
       {a},
       [](const Tensors& t) {
         auto p = t[0].split(4, 2);
         return p[0].sum() + p[1].exp();
       }},
      {"chunk",
       {a},
       [](const Tensors& t) {
         auto p = t[0].chunk(2, -1);
         return p[0] * p[1];
       }},
      {"flip", {a}, [](const Tensors& t) { return t[0].flip({1}); }},
      {"tril", {a}, [](const Tensors& t) { return t[0].tril(); }},
      {"pad",
       {a},
       [](const Tensors& t) {
         return at::constant_pad_nd(t[0], {1, 0}, 2.0);
       }},
      {"cat",
       {a, a},
       [](const Tensors& t) {
         return at::cat({t[0], t[1]}, 1);
       }},
      {"cat dim 0",
       {a, {3, 4, 6}},
       [](const Tensors& t) {
         return at::cat({t[0], t[1]}, 0);
       }},
      {"stack",
       {a, a},
       [](const Tensors& t) {
         return at::stack({t[0], t[1]}, 1);
       }},
      {"rotate half",
       {a, a},
       [](const Tensors& t) {
         return t[0] * t[1] + at::cat({-t[0].slice(2, 3, 6), t[0].slice(2, 0, 3)}, -1);
       }},
  };
  if (rows > 0) {
    cases.push_back({"select", {a}, [](const Tensors& t) { return t[0].select(1, 2) + t[0].select(0, 0)[0]; }});
  }
  return cases;
}

TEST(View, EqualsThePlainOperationOrNamesTheUnevenDim) {
  for (const int64_t rows : {1, 3, 4, 8, 9}) check_cases({2}, view_cases(rows));
  for (const int64_t rows : {3, 8}) check_cases({4}, view_cases(rows));
}

TEST(Dims, EqualThePlainOperationOnAllPlacements) { check_row_counts(dims_cases); }

TEST(Softmax, EqualsThePlainOperationOnAllPlacements) {
  for (const int64_t rows : {1, 3, 9}) {
    check_cases(
        {2, 4},
        {
            {"softmax", {{rows, 6}}, [](const Tensors& t) { return at::softmax(t[0], -1); }},
            {"log_softmax", {{rows, 4, 6}}, [](const Tensors& t) { return at::log_softmax(t[0], 1); }},
            {"cumsum", {{rows, 6}}, [](const Tensors& t) { return t[0].cumsum(0); }},
            {"layer_norm",
             {{rows, 4, 6}, {6}, {6}},
             [](const Tensors& t) { return at::layer_norm(t[0], {6}, t[1], t[2]); }},
            {"rms_norm", {{rows, 6}, {6}}, [](const Tensors& t) { return at::rms_norm(t[0], {6}, t[1], 1e-6); }},
        });
  }
}

at::Tensor spread_like(const at::Tensor& values, const at::Tensor& like, const Placements& how) {
  return is_dtensor(like) ? distribute_tensor(values, device_mesh(like), how, std::nullopt) : values;
}

TEST(Embedding, EqualsThePlainOperationForShardedTablesAndIndices) {
  for (const int64_t vocabulary : {3, 7, 9}) {
    const at::Tensor indices = at::arange(10).view({5, 2}) % vocabulary;
    std::vector<OpCase> cases;
    for (const auto& how : {Placements{Replicate()}, Placements{Shard(0)}, Placements{Shard(1)}}) {
      cases.push_back({"embedding " + to_string(how), {{vocabulary, 4}}, [=](const Tensors& t) {
                         return at::embedding(t[0], spread_like(indices, t[0], how));
                       }});
      cases.push_back({"gather " + to_string(how), {{5, 4}}, [=](const Tensors& t) {
                         return at::gather(t[0], 1, spread_like(indices % 4, t[0], how));
                       }});
    }
    const at::Tensor rows = at::tensor({2, 0, 2}) % vocabulary;
    cases.push_back({"index_select", {{vocabulary, 4}}, [=](const Tensors& t) {
                       return at::index_select(t[0], 0, spread_like(rows, t[0], {Replicate()}));
                     }});
    cases.push_back({"index", {{vocabulary, 4}}, [=](const Tensors& t) {
                       return t[0].index({spread_like(rows, t[0], {Replicate()})});
                     }});
    check_cases({2, 4}, cases);
  }
}

TEST(Loss, CrossEntropyCountsIgnoredTargetsOverTheWholeBatch) {
  for (const int64_t rows : {1, 3, 8, 9}) {
    at::Tensor target = at::arange(rows) % 5;
    if (rows > 1) target[1] = -100;
    std::vector<OpCase> cases;
    for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
      for (const auto& how : {Placements{Replicate()}, Placements{Shard(0)}}) {
        cases.push_back(
            {"cross_entropy " + std::to_string(reduction) + to_string(how), {{rows, 5}}, [=](const Tensors& t) {
               return at::cross_entropy_loss(t[0], spread_like(target, t[0], how), {}, reduction);
             }});
      }
    }
    check_cases({2, 4}, cases);
  }
}

TEST(Attention, EqualsThePlainOperationOverBatchHeadsAndQueries) {
  for (const int64_t batch : {1, 3}) {
    const std::vector<int64_t> q{batch, 4, 5, 8};
    std::vector<OpCase> cases;
    for (const bool causal : {false, true}) {
      cases.push_back(
          {causal ? "sdpa causal" : "sdpa",
           {q, q, q},
           [=](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0, causal); },
           false,
           false});
    }
    check_cases({2}, cases);
  }
}

TEST(OnTwoMeshDims, RandomCombinationsEqualThePlainOperation) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  for (const int64_t rows : {4, 9}) {
    for (auto cases :
         {pointwise_cases(rows), matmul_cases(rows), reduction_cases(rows), view_cases(rows), dims_cases(rows)}) {
      check_cases_on({2, 2}, cases, 6, seed);
    }
  }
}

}  // namespace
}  // namespace tessera
