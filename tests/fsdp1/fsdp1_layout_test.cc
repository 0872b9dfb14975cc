// Tests the layout of flat parameters (members, padding, alignment, shards) against numbers of PyTorch.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>

#include <functional>

#include "tessera/base/error.h"
#include "tessera/fsdp1/flat_parameter_layout.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// in_shard, offset_in_shard, numel_in_shard, intra_param_start, intra_param_end
using Info = std::array<int64_t, 5>;
constexpr Info kNotInShard = {0, 0, 0, 0, 0};

std::vector<Info> infos_of(const FlatParameterLayout& layout, int64_t rank) {
  std::vector<Info> out;
  for (const auto& info : layout.shard_param_infos(rank)) {
    out.push_back(
        {info.in_shard, info.offset_in_shard, info.numel_in_shard, info.intra_param_start, info.intra_param_end});
  }
  return out;
}

std::vector<FlatMember> members_of_numels(const std::vector<int64_t>& numels) {
  std::vector<FlatMember> out;
  for (int64_t numel : numels) out.push_back({.fqn = "p" + std::to_string(out.size()), .shape = {numel}});
  return out;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kShape);
    return error.what();
  }
  return "";
}
std::string error_of(std::vector<FlatMember> members, bool use_orig_params = false) {
  return message_of(
      [&] { FlatParameterLayout::make(std::move(members), {}, {.use_orig_params = use_orig_params}, 2); });
}

// Linear(3, 5) and Linear(5, 1, bias=False). The expected numbers were measured with PyTorch's FSDP1.
std::vector<FlatMember> two_linears() {
  return {{.fqn = "a.weight", .shape = {5, 3}}, {.fqn = "a.bias", .shape = {5}}, {.fqn = "b.weight", .shape = {1, 5}}};
}

TEST(FlatParameterLayout, MatchesPyTorchWithoutUseOrigParams) {
  const auto layout = FlatParameterLayout::make(two_linears(), {}, {}, 2);
  EXPECT_THAT(layout.numels_with_padding(), ElementsAre(15, 5, 5));
  EXPECT_THAT(layout.is_padding(), ElementsAre(false, false, false));
  EXPECT_EQ(layout.unpadded_numel(), 25);
  EXPECT_EQ(layout.sharded_numel(), 13);
  EXPECT_EQ(layout.padded_numel(), 26);
  EXPECT_EQ(layout.shard_padding(0), 0);
  EXPECT_EQ(layout.shard_padding(1), 1);
  EXPECT_THAT(infos_of(layout, 0), ElementsAre(Info{1, 0, 13, 0, 12}, kNotInShard, kNotInShard));
  EXPECT_THAT(infos_of(layout, 1), ElementsAre(Info{1, 0, 2, 13, 14}, Info{1, 2, 5, 0, 4}, Info{1, 7, 5, 0, 4}));
}

TEST(FlatParameterLayout, PadsForAlignmentWithUseOrigParams) {
  const auto layout = FlatParameterLayout::make(two_linears(), {}, {.use_orig_params = true}, 2);
  EXPECT_THAT(layout.numels_with_padding(), ElementsAre(15, 1, 5, 3, 5, 1));
  EXPECT_THAT(layout.is_padding(), ElementsAre(false, true, false, true, false, true));
  EXPECT_EQ(layout.unpadded_numel(), 30);
  EXPECT_EQ(layout.sharded_numel(), 15);
  EXPECT_EQ(layout.shard_padding(1), 0);
  EXPECT_THAT(infos_of(layout, 0), ElementsAre(Info{1, 0, 15, 0, 14}, kNotInShard, kNotInShard));
  EXPECT_THAT(infos_of(layout, 1), ElementsAre(kNotInShard, Info{1, 1, 5, 0, 4}, Info{1, 9, 5, 0, 4}));
  const auto flat = layout.flatten({at::arange(15).view({5, 3}), at::arange(5), at::arange(5).view({1, 5})});
  EXPECT_EQ(flat[15].item<int64_t>(), 42);
  EXPECT_EQ(layout.shard(flat, 1)[-1].item<int64_t>(), 42);
  EXPECT_EQ(layout.shard(flat, 1)[13].item<int64_t>(), 4);
}

TEST(FlatParameterLayout, AlignsTo16BytesOfTheComputeDtype) {
  const auto gaps = [](c10::ScalarType dtype, c10::ScalarType compute) {
    auto members = members_of_numels({1, 1});
    for (auto& member : members) member.dtype = dtype;
    return FlatParameterLayout::make(members, {}, {.use_orig_params = true, .compute_dtype = compute}, 1)
        .numels_with_padding()[1];
  };
  EXPECT_EQ(gaps(at::kFloat, at::ScalarType::Undefined), 3);
  EXPECT_EQ(gaps(at::kDouble, at::ScalarType::Undefined), 1);
  EXPECT_EQ(gaps(at::kBFloat16, at::ScalarType::Undefined), 7);
  EXPECT_EQ(gaps(at::kFloat, at::kBFloat16), 7);
}

TEST(FlatParameterLayout, RanksAfterTheLastChunkHaveNoElements) {
  const auto layout = FlatParameterLayout::make(members_of_numels({2, 3}), {}, {}, 4);  // chunks of 2, 2, 1, 0 elements
  EXPECT_EQ(layout.sharded_numel(), 2);
  EXPECT_EQ(layout.shard_padding(2), 1);
  EXPECT_EQ(layout.shard_padding(3), 2);
  EXPECT_THAT(infos_of(layout, 1), ElementsAre(kNotInShard, Info{1, 0, 2, 0, 1}));
  EXPECT_THAT(infos_of(layout, 3), ElementsAre(kNotInShard, kNotInShard));
  const auto flat = layout.flatten({at::arange(2) + 1, at::arange(3) + 3});
  EXPECT_TRUE(layout.shard(flat, 2).equal(at::tensor({5, 0}, at::kLong)));
  EXPECT_TRUE(layout.shard(flat, 3).equal(at::tensor({0, 0}, at::kLong)));
}

TEST(FlatParameterLayout, PlacesEmptyParametersAsPyTorch) {
  const auto layout = FlatParameterLayout::make(members_of_numels({0, 2, 0, 2, 0}), {}, {}, 2);
  // An empty member at the start of a shard, or behind the last element, is in no shard.
  EXPECT_THAT(infos_of(layout, 0),
              ElementsAre(kNotInShard, Info{1, 0, 2, 0, 1}, kNotInShard, kNotInShard, kNotInShard));
  EXPECT_THAT(infos_of(layout, 1),
              ElementsAre(kNotInShard, kNotInShard, kNotInShard, Info{1, 0, 2, 0, 1}, kNotInShard));
  const auto one = FlatParameterLayout::make(members_of_numels({2, 0, 2}), {}, {}, 1);
  EXPECT_THAT(infos_of(one, 0), ElementsAre(Info{1, 0, 2, 0, 1}, Info{1, 2, 0, 0, -1}, Info{1, 2, 2, 0, 1}));
  const auto nothing = FlatParameterLayout::make(members_of_numels({0}), {}, {.use_orig_params = true}, 3);
  EXPECT_EQ(nothing.sharded_numel(), 0);
  EXPECT_EQ(nothing.shard(nothing.flatten({at::empty({0})}), 2).numel(), 0);
}

TEST(FlatParameterLayout, UnflattenInvertsFlatten) {
  const auto transposed = at::randn({4, 3}).t();
  const auto channels_last = at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto scalar = at::randn({});
  const auto member = [](const char* name, const at::Tensor& tensor) {
    return FlatMember{.fqn = name,
                      .shape = tensor.sizes().vec(),
                      .contiguous = tensor.is_contiguous(),
                      .strides = tensor.strides().vec()};
  };
  const std::vector<FlatMember> members = {member("t", transposed), member("c", channels_last), member("s", scalar)};
  for (const bool use_orig_params : {false, true}) {
    const auto layout = FlatParameterLayout::make(members, {}, {.use_orig_params = use_orig_params}, 3);
    const auto flat = layout.flatten({transposed, channels_last, scalar});
    // The flat parameter has the values in storage order, whatever the strides of the source.
    EXPECT_TRUE(flat.narrow(0, 0, 12).equal(transposed.t().flatten()));
    EXPECT_TRUE(flat.equal(layout.flatten({transposed.contiguous(), channels_last.contiguous(), scalar})));
    std::vector<at::Tensor> parts;
    for (int64_t rank = 0; rank < 3; ++rank) parts.push_back(layout.shard(flat, rank));
    const auto back = layout.unflatten(at::cat(parts));
    EXPECT_TRUE(back[0].equal(transposed));
    EXPECT_TRUE(back[1].equal(channels_last));
    EXPECT_EQ(back[1].strides(), channels_last.strides());
    EXPECT_TRUE(back[2].equal(scalar));
    EXPECT_EQ(layout.flatten({{}, channels_last, {}}).narrow(0, 0, 12).abs().sum().item<float>(), 0);
    const auto refused = [&](const at::Tensor& second) {
      return message_of([&] { layout.flatten({transposed, second, scalar}); });
    };
    EXPECT_THAT(refused(channels_last.flatten()), HasSubstr("[fsdp1.flatten] c: found Float of shape "));
    EXPECT_THAT(refused(channels_last.to(at::kDouble)), HasSubstr("[fsdp1.flatten] c: found Double of shape "));
  }
}

TEST(FlatParameterLayout, RequiresGradIfAnyMemberDoes) {
  auto members = two_linears();
  members[0].requires_grad = members[1].requires_grad = false;
  EXPECT_TRUE(FlatParameterLayout::make(members, {}, {.use_orig_params = true}, 2).requires_grad());
  members[2].requires_grad = false;
  EXPECT_FALSE(FlatParameterLayout::make(members, {}, {}, 2).requires_grad());
}

TEST(FlatParameterLayout, RefusesWhatPyTorchRefuses) {
  EXPECT_THAT(error_of({}), HasSubstr("Cannot construct a FlatParamHandle with an empty parameter list"));
  auto members = two_linears();
  members[1].dtype = at::kBFloat16;
  EXPECT_THAT(error_of(members), HasSubstr("Must flatten tensors with uniform dtype but got Float (a.weight) and "
                                           "BFloat16 (a.bias)"));
  members = two_linears();
  members[0].dtype = at::kLong;
  EXPECT_THAT(error_of(members), HasSubstr("a.weight: Cannot flatten integer dtype tensors"));
  members = two_linears();
  members[2].requires_grad = false;
  EXPECT_THAT(error_of(members),
              HasSubstr("Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"));
  EXPECT_THAT(error_of(members, true), IsEmpty());
  members = two_linears();
  members[1].device = at::Device("cuda:0");
  EXPECT_THAT(error_of(members), HasSubstr("Must flatten tensors on the same device but got both cpu (a.weight) and "
                                           "cuda:0 (a.bias)"));
}

TEST(FlatParameterLayout, RefusesStridesWithGapsOrOverlaps) {
  EXPECT_THAT(error_of({{.fqn = "w", .shape = {4, 2}, .contiguous = false, .strides = {3, 1}}}),
              HasSubstr("w: strides 3,1 of shape 4x2 leave gaps or overlap"));
  EXPECT_THAT(error_of({{.fqn = "w", .shape = {4, 2}, .contiguous = false, .strides = {0, 1}}}),
              HasSubstr("leave gaps or overlap"));
  EXPECT_THAT(error_of({{.fqn = "w", .shape = {4, 1}, .contiguous = false, .strides = {1, 4}}}), IsEmpty());
}

TEST(FlatParameterLayout, RefusesTensorsOfOtherShapesOrDtypes) {
  const auto layout = FlatParameterLayout::make(two_linears(), {}, {}, 2);
  EXPECT_THROW(layout.flatten({at::randn({5, 3})}), Error);
  EXPECT_THROW(layout.flatten({at::randn({3, 5}), {}, {}}), Error);
  EXPECT_THROW(layout.flatten({at::randn({5, 3}), at::randn({5}).to(at::kDouble), {}}), Error);
  EXPECT_THROW(layout.unflatten(at::randn({24})), Error);
  EXPECT_THROW(layout.unflatten(at::randn({25, 2}).select(1, 0)), Error);
  EXPECT_THROW(layout.shard(at::randn({26}), 0), Error);
  EXPECT_THROW(layout.shard(at::randn({25}), 2), Error);
  EXPECT_THROW(layout.shard_param_infos(2), Error);
}

}  // namespace
}  // namespace tessera
