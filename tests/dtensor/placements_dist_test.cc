// Tests the result placements and the collectives of operations against upstream's tables, on a mesh of 4 with even
// dims.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using ::testing::StartsWith;

Placement parse(const std::string& text) {
  if (text == "R") return Replicate();
  if (text == "P") return Partial();
  return Shard(text[1] - '0');
}

at::Tensor tensor_of(const std::vector<int64_t>& shape, const std::string& placement, const MeshPtr& mesh) {
  const auto count = c10::multiply_integers(shape);
  return distribute_tensor(at::arange(1, count + 1, at::kFloat).view(shape), mesh, {parse(placement)}, std::nullopt);
}

// Returns the placement and the collectives as text: AG all_gather, AR all_reduce, RS reduce_scatter, A2A all_to_all.
std::string outcome(const std::function<at::Tensor()>& run) {
  CommDebugMode count;
  const at::Tensor result = run();
  std::string text = to_string(placements(result)[0]);
  const std::pair<int64_t, const char*> kinds[] = {{count.all_gathers(), "AG"},
                                                   {count.all_reduces(), "AR"},
                                                   {count.reduce_scatters(), "RS"},
                                                   {count.all_to_alls(), "A2A"}};
  for (const auto& [n, name] : kinds) {
    if (n > 0) text += std::string(" ") + name + (n > 1 ? std::to_string(n) : "");
  }
  return text;
}

using Binary = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;

struct BinaryRow {
  const char* left;
  const char* right;
  const char* wanted;
};

void check_binary(const char* name, const std::vector<int64_t>& a, const std::vector<int64_t>& b, const Binary& op,
                  const std::vector<BinaryRow>& rows) {
  on_ranks(4, {4}, [&](const MeshPtr& mesh) {
    for (const auto& row : rows) {
      const auto x = tensor_of(a, row.left, mesh);
      const auto y = tensor_of(b, row.right, mesh);
      EXPECT_EQ(outcome([&] { return op(x, y); }), row.wanted) << name << ' ' << row.left << ',' << row.right;
    }
  });
}

// On the CPU a shard moves to another dim by an all_to_all. Upstream gathers the tensor and slices it there.
TEST(Golden, PointwiseTable) {
  const std::vector<int64_t> s{8, 8};
  check_binary("add", s, s, [](const at::Tensor& a, const at::Tensor& b) { return a + b; },
               {{"R", "R", "R"},
                {"R", "S0", "S(0)"},
                {"R", "S1", "S(1)"},
                {"R", "P", "P(sum)"},
                {"S0", "R", "S(0)"},
                {"S0", "S0", "S(0)"},
                {"S0", "S1", "S(0) A2A"},
                {"S0", "P", "S(0) RS"},
                {"S1", "R", "S(1)"},
                {"S1", "S0", "S(0) A2A"},
                {"S1", "S1", "S(1)"},
                {"S1", "P", "S(1) RS"},
                {"P", "R", "P(sum)"},
                {"P", "S0", "S(0) RS"},
                {"P", "S1", "S(1) RS"},
                {"P", "P", "P(sum)"}});
  check_binary("mul", s, s, [](const at::Tensor& a, const at::Tensor& b) { return a * b; },
               {{"R", "P", "P(sum)"},
                {"P", "R", "P(sum)"},
                {"P", "S0", "S(0) RS"},
                {"P", "S1", "S(1) RS"},
                {"P", "P", "P(sum) AR"},
                {"S0", "S1", "S(0) A2A"}});
  check_binary("div", s, s, [](const at::Tensor& a, const at::Tensor& b) { return a / b; },
               {{"R", "P", "R AR"}, {"P", "R", "P(sum)"}, {"P", "S0", "S(0) RS"}, {"P", "P", "P(sum) AR"}});
  check_binary("maximum", s, s, [](const at::Tensor& a, const at::Tensor& b) { return at::maximum(a, b); },
               {{"R", "P", "R AR"}, {"P", "S0", "S(0) RS"}, {"P", "P", "R AR2"}});
}

TEST(Golden, UnaryOfPartial) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    const auto p = tensor_of({8, 8}, "P", mesh);
    EXPECT_EQ(outcome([&] { return -p; }), "P(sum)");
    EXPECT_EQ(outcome([&] { return p * 2; }), "P(sum)");
    EXPECT_EQ(outcome([&] { return p / 2; }), "P(sum)");
    EXPECT_EQ(outcome([&] { return p.to(at::kDouble); }), "P(sum)");
    EXPECT_EQ(outcome([&] { return p.to(at::kBFloat16); }), "R AR");  // rounded once; upstream rounds each local tensor
    EXPECT_EQ(outcome([&] { return p + 1; }), "R AR");
    EXPECT_EQ(outcome([&] { return p.pow(2); }), "R AR");
    EXPECT_EQ(outcome([&] { return p.abs(); }), "R AR");
    EXPECT_EQ(outcome([&] { return p.exp(); }), "R AR");
    EXPECT_EQ(outcome([&] { return p.relu(); }), "R AR");
    EXPECT_EQ(outcome([&] { return p.to(at::kInt); }), "R AR");
    EXPECT_EQ(outcome([&] { return p.clone(); }), "R AR");
    EXPECT_EQ(outcome([&] { return p.detach(); }), "P(sum)");
    EXPECT_EQ(outcome([&] { return p.contiguous(); }), "P(sum)");
    EXPECT_EQ(outcome([&] { return at::zeros_like(p); }), "R");
    EXPECT_EQ(outcome([&] { return p.new_empty({8, 8}); }), "P(sum)");
    EXPECT_EQ(outcome([&] { return tensor_of({8, 8}, "P", mesh).zero_(); }), "P(sum)");
    const auto m = from_local(at::ones({8}), mesh, {Partial(ReduceOp::kMax)});
    EXPECT_EQ(outcome([&] { return m.exp(); }), "P(max)");
    EXPECT_EQ(outcome([&] { return at::maximum(m, m); }), "P(max)");
  });
}

TEST(Golden, MatmulTables) {
  const std::vector<int64_t> s{8, 8};
  check_binary("mm", s, s, [](const at::Tensor& a, const at::Tensor& b) { return at::mm(a, b); },
               {{"R", "R", "R"},
                {"R", "S0", "P(sum)"},
                {"R", "S1", "S(1)"},
                {"R", "P", "P(sum)"},
                {"S0", "R", "S(0)"},
                {"S0", "S0", "S(0) AG"},
                {"S0", "S1", "S(0) AG"},
                {"S0", "P", "P(sum) AG"},
                {"S1", "R", "P(sum)"},
                {"S1", "S0", "P(sum)"},
                {"S1", "S1", "S(1) AG"},
                {"S1", "P", "P(sum) RS"},
                {"P", "R", "P(sum)"},
                {"P", "S0", "P(sum) RS"},
                {"P", "S1", "P(sum) AG"},
                {"P", "P", "P(sum) AR"}});
  const std::vector<int64_t> b{8, 8, 8};
  check_binary("bmm", b, b, [](const at::Tensor& a, const at::Tensor& c) { return at::bmm(a, c); },
               {{"R", "R", "R"},       {"R", "S0", "S(0)"},      {"R", "S1", "P(sum)"},    {"R", "S2", "S(2)"},
                {"S0", "R", "S(0)"},   {"S0", "S0", "S(0)"},     {"S0", "S1", "S(0) A2A"}, {"S0", "S2", "S(2) AG"},
                {"S1", "R", "S(1)"},   {"S1", "S0", "S(1) AG"},  {"S1", "S1", "S(1) AG"},  {"S1", "S2", "S(1) AG"},
                {"S2", "R", "P(sum)"}, {"S2", "S0", "S(0) A2A"}, {"S2", "S1", "P(sum)"},   {"S2", "S2", "S(2) AG"},
                {"P", "R", "P(sum)"},  {"P", "S0", "S(0) RS"},   {"P", "S1", "P(sum) RS"}, {"P", "S2", "P(sum) AG"}});
}

struct UnaryRow {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> op;
  std::vector<const char*> wanted;  // the result for each placement in turn
};

void check_unary(const std::vector<int64_t>& shape, const std::vector<const char*>& from,
                 const std::vector<UnaryRow>& rows) {
  on_ranks(4, {4}, [&](const MeshPtr& mesh) {
    for (const auto& row : rows) {
      for (size_t i = 0; i < from.size(); ++i) {
        const auto x = tensor_of(shape, from[i], mesh);
        EXPECT_EQ(outcome([&] { return row.op(x); }), row.wanted[i]) << row.name << " of " << from[i];
      }
    }
  });
}

using T = const at::Tensor&;

TEST(Golden, ReductionTable) {
  check_unary({8, 8}, {"S0", "S1", "P"},
              {
                  {"sum(0)", [](T x) { return x.sum(0); }, {"P(sum)", "S(0)", "P(sum)"}},
                  {"mean(0)", [](T x) { return x.mean(0); }, {"P(avg)", "S(0)", "R AR"}},
                  {"prod(0)", [](T x) { return x.prod(0); }, {"P(product)", "S(0)", "R AR"}},
                  {"any(0)", [](T x) { return (x > 3).any(0); }, {"P(max)", "S(0)", "R AR"}},
                  {"amax(0)", [](T x) { return at::amax(x, {0}); }, {"P(max)", "S(0)", "R AR"}},
                  {"max(0)", [](T x) { return std::get<0>(x.max(0)); }, {"R AG", "S(0)", "R AR"}},
                  {"var(0)", [](T x) { return x.var(0); }, {"R AG", "S(0)", "R AR"}},
                  {"norm 2",
                   [](T x) { return at::linalg_vector_norm(x, 2, {at::IntArrayRef{0}}); },
                   {"_NormP(2)", "S(0)", "R AR"}},
                  {"softmax(0)", [](T x) { return at::softmax(x, 0); }, {"R AG", "S(1)", "R AR"}},
                  {"cumsum(0)", [](T x) { return x.cumsum(0); }, {"R AG", "S(1)", "R AR"}},
              });
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    EXPECT_EQ(outcome([&] { return tensor_of({9, 8}, "S0", mesh).mean(0); }), "R AG");  // unequal weights
  });
}

TEST(Golden, ViewTable) {
  check_unary({8, 4, 16}, {"S0", "S1", "S2"},
              {
                  {"view(32,16)",
                   [](T x) {
                     return x.view({32, 16});
                   },
                   {"S(0)", "_S(0, 8)", "S(1)"}},
                  {"view(8,64)",
                   [](T x) {
                     return x.view({8, 64});
                   },
                   {"S(0)", "S(1)", "_S(1, 4)"}},
                  {"flatten", [](T x) { return x.flatten(); }, {"S(0)", "_S(0, 8)", "_S(0, 32)"}},
                  {"transpose(0,2)", [](T x) { return x.transpose(0, 2); }, {"S(2)", "S(1)", "S(0)"}},
                  {"unsqueeze(0)",
                   [](T x) {
                     return x.unsqueeze(0).expand({3, 8, 4, 16});
                   },
                   {"S(1)", "S(2)", "S(3)"}},
                  {"select(0)", [](T x) { return x.select(0, 1); }, {"R AG", "S(0)", "S(1)"}},
                  {"slice dim 1", [](T x) { return x.slice(1, 1, 3); }, {"S(0)", "R AG", "S(2)"}},
                  {"flip(0)", [](T x) { return x.flip({0}); }, {"R AG", "S(1)", "S(2)"}},
              });
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    EXPECT_THAT(
        error_of([&] {
          tensor_of({8, 4, 16}, "S2", mesh).view({8, 4, 2, 8});
        }),
        HasSubstr("Cannot unflatten unevenly sharded tensor: output dimension 2 (size 2) is not evenly divisible by "
                  "mesh dimension 0 (size 4). Please redistribute the tensor before this operation."));
    EXPECT_THAT(error_of([&] { tensor_of({8, 4, 16}, "S0", mesh).view({2, 4, 4, 16}); }), HasSubstr("(size 2)"));
    EXPECT_THAT(error_of([&] {
                  tensor_of({3, 4}, "S0", mesh).view({12});
                }),
                HasSubstr("Cannot flatten unevenly sharded tensor: dimension 0 (size 3)"));
    const auto x = tensor_of({8, 4, 16}, "S1", mesh);
    EXPECT_EQ(to_local(x.view({8, 4, 4, 4})).data_ptr(), to_local(x).data_ptr());
  });
}

TEST(Golden, CatAndStackTables) {
  const std::vector<int64_t> s{8, 8};
  check_binary("cat(1)", s, s,
               [](T a, T b) {
                 return at::cat({a, b}, 1);
               },
               {{"S0", "S0", "S(0)"},
                {"S0", "S1", "S(0) A2A"},
                {"S0", "P", "S(0) RS"},
                {"S0", "R", "S(0)"},
                {"S1", "S1", "R AG2"},
                {"S1", "P", "R AG AR"},
                {"P", "P", "P(sum)"},
                {"P", "R", "P(sum)"}});
  check_binary("stack(0)", s, s,
               [](T a, T b) {
                 return at::stack({a, b}, 0);
               },
               {{"S0", "S0", "S(1)"},
                {"S0", "S1", "R AG2"},
                {"S0", "P", "S(1) RS"},
                {"S0", "R", "S(1)"},
                {"S1", "S1", "S(2)"},
                {"S1", "P", "S(2) RS"},
                {"P", "P", "P(sum)"},
                {"P", "R", "P(sum)"}});
}

TEST(InPlace, WrittenOperandIsNeverRedistributed) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    at::NoGradGuard no_grad;
    auto s = tensor_of({8, 8}, "S0", mesh);
    const auto local = to_local(s);
    const auto version = local._version();
    EXPECT_TRUE(s.add_(tensor_of({8, 8}, "R", mesh)).is_same(s));
    EXPECT_GT(local._version(), version);
    EXPECT_TRUE(to_local(s).is_same(local));
    EXPECT_TRUE(at::equal(full_tensor(s), at::arange(1, 65, at::kFloat).view({8, 8}) * 2));
    EXPECT_EQ(outcome([&] { return s.copy_(tensor_of({8, 8}, "P", mesh)); }), "S(0) RS");
    for (const auto& run : std::vector<std::function<void()>>{
             [&] {
               tensor_of({8, 8}, "P", mesh).add_(1);
             },
             [&] {
               tensor_of({8, 8}, "P", mesh).relu_();
             },
             [&] {
               tensor_of({8, 8}, "R", mesh).copy_(tensor_of({8, 8}, "R", mesh));
               tensor_of({8, 8}, "P", mesh).masked_fill_(tensor_of({8, 8}, "R", mesh) > 0, 1);
             },
             [&] {
               at::_foreach_add_({tensor_of({8, 8}, "P", mesh)}, 1.0);
             }}) {
      EXPECT_THAT(error_of(run), StartsWith("Sharding dimension mismatch"));
    }
    EXPECT_THAT(error_of([&] { tensor_of({8}, "S0", mesh).resize_({4}); }), HasSubstr("no storage of its own"));
    at::Tensor turned = tensor_of({8, 8}, "S0", mesh);
    const at::Tensor whole = full_tensor(turned);
    turned.t_();
    EXPECT_EQ(to_string(placements(turned)), "(S(1))");
    EXPECT_TRUE(at::equal(full_tensor(turned), whole.t()));
  });
}

TEST(MixedOperands, PlainTensorsAreErrorsUnlessReplicationIsImplicit) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto s = tensor_of({4, 4}, "S0", mesh);
    EXPECT_EQ(outcome([&] { return s * at::tensor(2.0F); }), "S(0)");
    EXPECT_THAT(
        error_of([&] {
          at::mm(s, at::ones({4, 4}));
        }),
        HasSubstr("aten::mm got mixed torch.Tensor and DTensor: argument 'mat2' is a plain tensor of shape [4, 4]"));
    EXPECT_THAT(error_of([&] { at::cat({s, at::ones({4, 4})}); }), HasSubstr("argument 'tensors'[1]"));
    EXPECT_THAT(error_of([&] { at::ones({4, 4}).mul_(s); }), HasSubstr("'self'"));
    {
      ImplicitReplication alike;
      EXPECT_EQ(outcome([&] { return at::mm(s, at::ones({4, 4})); }), "S(0)");
    }
    EXPECT_THAT(error_of([&] { at::mm(s, at::ones({4, 4})); }), HasSubstr("mixed"));
    const auto other = init_device_mesh(mesh->world(), "cpu", {2, 1});
    EXPECT_THAT(error_of([&] {
                  s + distribute_tensor(at::ones({4, 4}), other, {Shard(0), Replicate()}, std::nullopt);
                }),
                HasSubstr("inputs with different meshes"));
    EXPECT_THAT(error_of([&] { at::unique_consecutive(tensor_of({4}, "S0", mesh).to(at::kLong)); }),
                HasSubstr("aten::unique_consecutive(self: [4] (S(0))): the operation does not have a sharding rule "
                          "registered. Add one with"));
  });
}

TEST(Item, ReducesAPartial) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    const auto s = tensor_of({8}, "S0", mesh);
    EXPECT_EQ(s.sum().item<float>(), 36);
    EXPECT_EQ(s.max().item<float>(), 8);
    EXPECT_NEAR(at::linalg_vector_norm(s).item<float>(), std::sqrt(204.0F), 1e-5);
    EXPECT_TRUE((s > 0).all().item<bool>());
    EXPECT_TRUE((s > 7).any().item<bool>());
    EXPECT_TRUE(at::equal(s, tensor_of({8}, "R", mesh)));
    EXPECT_TRUE(at::allclose(s, tensor_of({8}, "R", mesh)));
  });
}

TEST(Equal, ComparesShardsAndReducesOneFlag) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = at::arange(35, at::kDouble).view({7, 5});
    const at::Tensor other = plain.clone();
    other[6][4] = -1;  // an element of the last rank only
    const std::vector<Placements> all = {{Replicate(), Replicate()},
                                         {Shard(0), Shard(1)},
                                         {Shard(0), Shard(0)},
                                         {Shard(1), Replicate()},
                                         {Partial(), Shard(0)}};
    const auto place = [&](const at::Tensor& whole, const Placements& how) {
      Placements cut = how;
      std::replace(cut.begin(), cut.end(), Placement(Partial()), Placement(Replicate()));
      const at::Tensor spread = distribute_tensor(whole.clone(), mesh, cut, std::nullopt);
      if (cut == how) return spread;
      const double share = (*mesh->coordinate())[0] == 0 ? 2 : -1;
      return from_local(to_local(spread) * share, mesh, how,
                        {.shape = whole.sizes().vec(), .stride = whole.strides().vec()});
    };
    for (const auto& mine : all) {
      for (const auto& theirs : all) {
        EXPECT_TRUE(at::equal(place(plain, mine), place(plain, theirs))) << to_string(mine) << to_string(theirs);
        EXPECT_FALSE(at::equal(place(plain, mine), place(other, theirs))) << to_string(mine) << to_string(theirs);
      }
    }
    const at::Tensor cut = place(plain, {Shard(0), Shard(1)});
    const at::Tensor whole = place(plain, {Replicate(), Replicate()});
    CommDebugMode count;
    EXPECT_TRUE(at::equal(cut, whole));
    EXPECT_LE(count.total_bytes(), 4);
  });
}

TEST(RanksOutsideTheMesh, ComputeNothingAndGetEmptyResults) {
  comm::run_thread_ranks(3, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {2});
    const auto t = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    const auto y = at::mm(t, t).relu_().t();
    EXPECT_EQ(y.sizes(), (at::IntArrayRef{4, 4}));
    if (world->rank() == 2) {
      EXPECT_EQ(to_local(y).numel(), 0);
    } else {
      EXPECT_TRUE(at::equal(full_tensor(y), at::full({4, 4}, 4.0)));
    }
  });
}

}  // namespace
}  // namespace tessera
