// Tests an index that is out of range. Every rank that holds the index raises, also a rank whose local tensor has no
// elements. The other ranks receive the error in their next collective.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::on_ranks;

using Lookup = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& index, const at::Tensor& values)>;

c10::List<std::optional<at::Tensor>> only(const at::Tensor& index) {
  c10::List<std::optional<at::Tensor>> list;
  list.push_back(index);
  return list;
}

// Lookups of x [4, 1] at two indices of its first dim.
std::vector<std::pair<std::string, Lookup>> lookups() {
  using T = const at::Tensor&;
  return {
      {"index_select", [](T x, T index, T) { return x.index_select(0, index); }},
      {"index", [](T x, T index, T) { return x.index(only(index)); }},
      {"embedding", [](T x, T index, T) { return at::embedding(x, index); }},
      {"gather", [](T x, T index, T) { return x.gather(0, index.unsqueeze(1)); }},
      {"take", [](T x, T index, T) { return x.take(index); }},
      {"index_add", [](T x, T index, T values) { return x.index_add(0, index, values); }},
      {"index_copy", [](T x, T index, T values) { return x.index_copy(0, index, values); }},
      {"index_fill", [](T x, T index, T) { return x.index_fill(0, index, 2); }},
      {"index_put", [](T x, T index, T values) { return x.index_put(only(index), values); }},
      {"scatter", [](T x, T index, T values) { return x.scatter(0, index.unsqueeze(1), values); }},
      {"scatter_add", [](T x, T index, T values) { return x.scatter_add(0, index.unsqueeze(1), values); }},
      {"put", [](T x, T index, T values) { return x.put(index, values.squeeze(1)); }},
  };
}

TEST(OutOfRange, RaisesOnAllRanksThatHoldTheIndex) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto whole = [&](const at::Tensor& t) { return distribute_tensor(t, mesh, {Replicate()}); };
    const at::Tensor values = whole(at::ones({2, 1}, at::kDouble));
    for (const auto& [name, lookup] : lookups()) {
      for (const Placement& lie : {Replicate(), Shard(1), Shard(0)}) {  // Shard(1): rank 1 has no elements
        const at::Tensor x = distribute_tensor(at::ones({4, 1}, at::kDouble), mesh, {lie});
        EXPECT_NO_THROW(lookup(x, whole(at::tensor({3, 1}, at::kLong)), values)) << name;
        const bool cut_with_x = lie == Shard(1) && (name == "gather" || name.starts_with("scatter"));
        if (!cut_with_x) {
          EXPECT_ANY_THROW(lookup(x, whole(at::tensor({3, 9}, at::kLong)), values))
              << name << " " << to_string(Placements{lie});
        }
      }
    }
  });
}

TEST(OutOfRange, EndsTheOtherRanksWhenTheIndexIsSharded) {
  try {
    on_ranks(2, {2}, [](const MeshPtr& mesh) {
      const at::Tensor x = distribute_tensor(at::ones({4, 3}, at::kDouble), mesh, {Replicate()});
      const at::Tensor index = distribute_tensor(at::tensor({3, 9}, at::kLong), mesh, {Shard(0)});
      full_tensor(x.index_select(0, index));
    });
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("index out of range"));
  }
}

}  // namespace
}  // namespace tessera
