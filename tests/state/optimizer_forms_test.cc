// Tests the forms of an optimizer's state dict (ids, names, flat keys) and the conversions between them.
#include "tessera/state/optimizer_forms.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <ctime>
#include <iostream>

#include "tessera/state/detail/flat_key.h"
#include "tests/state/values.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

StateDict named_dict(const std::vector<std::vector<std::string>>& groups) {
  StateDict state;
  StateList shown;
  double lr = 0.5;
  for (const auto& group : groups) {
    StateList params;
    for (const auto& name : group) {
      state.set(name, StateDict{{"step", at::zeros({})}, {"exp_avg", at::zeros({1})}});
      params.emplace_back(name);
    }
    shown.emplace_back(StateDict{{"lr", lr /= 2}, {"betas", StateTuple{{0.9, 0.95}}}, {"params", params}});
  }
  return {{"state", state}, {"param_groups", shown}};
}

TEST(OptimizerForms, RoundTrip) {
  EXPECT_TRUE(rc::check([] {
    std::vector<std::vector<std::string>> groups;
    std::vector<std::string> names;
    const int count = *rc::gen::inRange(1, 4);
    for (int g = 0; g < count; ++g) {
      auto& group = groups.emplace_back();
      for (int i = *rc::gen::inRange(1, 5); i > 0; --i) {
        // Some names begin with other names, or with names of states.
        const auto parts = *rc::gen::container<std::vector<std::string>>(
            2, rc::gen::element<std::string>("a", "b", "step", "state", "exp_avg", "0"));
        const auto name = parts[0] + "." + parts[1] + "." + std::to_string(names.size());
        group.push_back(name);
        names.push_back(name);
      }
    }
    const auto named = named_dict(groups);
    const auto ids = optimizer_dict_to_ids(named);
    RC_ASSERT(same_values(optimizer_dict_to_names(ids, names), named));
    RC_ASSERT(same_values(optimizer_dict_to_ids(optimizer_dict_to_names(ids, names)), ids));
    RC_ASSERT(same_values(unflatten_optimizer_dict(flatten_optimizer_dict(named), groups), named));
  }));
}

TEST(OptimizerForms, FlatKeysNameParameterAndHyperparameter) {
  const auto flat = flatten_optimizer_dict(
      {{"state", StateDict{{"a.w", StateDict{{"step", 1}, {"inner", StateDict{{"q", 2.0}, {int64_t{0}, 3}}}}}}},
       {"param_groups", StateList{StateDict{{"lr", 0.5}, {"foreach", nullptr}, {"params", StateList{"a.w", "a.b"}}},
                                  StateDict{{"lr", 1.5}, {"params", StateList{}}}}}});
  EXPECT_THAT(keys_of(flat),
              ElementsAre("state.a.w.step", "state.a.w.inner.q", "state.a.w.inner.0", "param_groups.a.w.lr",
                          "param_groups.a.w.foreach", "param_groups.a.b.lr", "param_groups.a.b.foreach"));
  const auto named = unflatten_optimizer_dict(flat, {{"a.w", "a.b"}, {"elsewhere"}});
  EXPECT_EQ(named.at("state").dict().at("a.w").dict().at("inner").dict().at("q").number(), 2);
  EXPECT_EQ(named.at("state").dict().size(), 1u);  // a.b has no state and gets no empty entry
  EXPECT_TRUE(same_values(named.at("param_groups").list()[1], StateDict{{"params", StateList{}}}));
}

TEST(OptimizerForms, RefuseInputsThatWouldLoseValues) {
  auto named = named_dict({{"a", "b"}});
  auto flat = flatten_optimizer_dict(named);
  flat.set("param_groups.b.lr", 0.125);
  EXPECT_THAT(thrown_by([&] {
                unflatten_optimizer_dict(flat, {{"a", "b"}});
              }),
              HasSubstr("should have the same saved param_group value. But b.lr is 0.125 while other(s) is 0.25"));
  EXPECT_NO_THROW(unflatten_optimizer_dict(flat, {{"a"}, {"b"}}));
  EXPECT_THAT(thrown_by([&] { unflatten_optimizer_dict(flat, {{"a"}, {"a"}}); }), HasSubstr("in two groups"));
  EXPECT_THAT(thrown_by([&] { unflatten_optimizer_dict({{int64_t{3}, 1}}, {{"a"}}); }), HasSubstr("by id"));
  named.at("state").dict().at("a").dict().set("note", "text");
  EXPECT_THAT(thrown_by([&] { flatten_optimizer_dict(named); }), HasSubstr("Type is str"));
  EXPECT_THAT(thrown_by([&] { optimizer_dict_to_names(optimizer_dict_to_ids(named), {"a"}); }),
              HasSubstr("more parameters than the 1 names"));
  EXPECT_THAT(thrown_by([&] {
                optimizer_dict_to_names(optimizer_dict_to_ids(named), {"a", "a"});
              }),
              HasSubstr("twice"));
  EXPECT_THAT(thrown_by([&] {
                optimizer_dict_to_names(optimizer_dict_to_ids(named), {"a", "b", "c"});
              }),
              HasSubstr("found 3 names"));
  EXPECT_THAT(thrown_by([] {
                unflatten_optimizer_dict({{"state.a.inner", 1}, {"state.a.inner.q", 2}}, {{"a"}});
              }),
              HasSubstr("'state.a.inner.q': 'inner' has a value itself"));
  EXPECT_THAT(thrown_by([] {
                unflatten_optimizer_dict({{"state.a.inner.q", 1}, {"state.a.inner", 2}}, {{"a"}});
              }),
              HasSubstr("'state.a.inner': there is a value below the same name"));
  auto by_id = optimizer_dict_to_ids(named);
  by_id.at("param_groups").list().push_back(StateDict{{"params", StateList{1}}});
  EXPECT_THAT(thrown_by([&] {
                optimizer_dict_to_names(by_id, {"a", "b", "c"});
              }),
              HasSubstr("parameter '1' is in two groups"));
  named.at("param_groups").list().push_back(StateDict{{"params", StateList{"b"}}});
  EXPECT_THAT(thrown_by([&] { optimizer_dict_to_ids(named); }), HasSubstr("'b' is in two groups"));
}

// 18,000 parameters are converted between all forms with a few look-ups for each.
TEST(OptimizerForms, TakeLinearTime) {
  std::vector<std::string> names;
  for (int i = 0; i < 18000; ++i) {
    names.push_back("model.layers." + std::to_string(i / 9) + ".block.linear" + std::to_string(i % 9) + ".weight");
  }
  const auto named = named_dict({names});
  const auto begin = std::clock();
  const auto ids = optimizer_dict_to_ids(named);
  const auto again = optimizer_dict_to_names(ids, names);
  const auto flat = flatten_optimizer_dict(again);
  const auto back = unflatten_optimizer_dict(flat, {names});
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  std::cout << "18000 parameters: to ids, names, flat and back in " << seconds << " s of CPU\n";
  EXPECT_EQ(flat.size(), 4 * names.size());
  EXPECT_EQ(back.at("state").dict().size(), names.size());

  detail::FlatKeyReader reader(names);
  for (const auto& [key, value] : flat) {
    ASSERT_TRUE(reader.read(std::get<std::string>(key)));
  }
  EXPECT_EQ(reader.lookups(), static_cast<int64_t>(flat.size()));  // the first candidate is the name
}

}  // namespace
}  // namespace tessera::testing
