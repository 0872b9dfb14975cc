// Tests of the layout of a group's parameters in one flat buffer, and of the pool of such buffers.
#include "tessera/parallel/data_parallel/flat_layout.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <set>

#include "tessera/parallel/data_parallel/buffer_pool.h"

namespace tessera {
namespace {

struct Case {
  FlatLayout layout{1};
  std::vector<at::Tensor> gradients;
};

Case random_case(c10::ScalarType dtype) {
  Case out;
  out.layout = FlatLayout(*rc::gen::inRange<int64_t>(1, 6));
  const auto count = *rc::gen::inRange(1, 5);
  for (int i = 0; i < count; ++i) {
    const auto rows = *rc::gen::inRange<int64_t>(0, 9);
    const auto width = *rc::gen::inRange<int64_t>(1, 100);
    out.layout.append(rows, width, static_cast<int64_t>(c10::elementSize(dtype)));
    out.gradients.push_back((at::arange(rows * width, at::kFloat).view({rows, width}) + i * 0.5).to(dtype));
  }
  return out;
}

at::Tensor chunk_of(const Case& drawn, size_t i, int64_t rank) {
  const auto& entry = drawn.layout.entries[i];
  return drawn.gradients[i].narrow(0, std::min(rank * entry.chunk_rows, entry.rows), entry.rows_on(rank));
}

TEST(FlatLayout, PacksEachRanksRowsAndZeroesTheRest) {
  EXPECT_TRUE(rc::check([] {
    const auto drawn = random_case(at::kFloat);
    const auto& layout = drawn.layout;
    const int64_t part = layout.part_bytes / 4;
    auto parts = at::full({layout.ranks * part}, 7.0f);
    auto expected = at::zeros({layout.ranks, part});
    std::vector<bool> filled;
    const bool transposed = *rc::gen::arbitrary<bool>();
    for (size_t i = 0; i < layout.entries.size(); ++i) {
      filled.push_back(*rc::gen::arbitrary<bool>());
      if (!filled[i]) continue;
      const auto& gradient = drawn.gradients[i];
      pack_gradient(layout, i, transposed ? gradient.t().contiguous().t() : gradient, parts, false);
      pack_gradient(layout, i, gradient.to(at::kDouble), parts, true);
      for (int64_t rank = 0; rank < layout.ranks; ++rank) {
        const auto chunk = chunk_of(drawn, i, rank).flatten() * 2;
        expected[rank].narrow(0, layout.entries[i].offset / 4, chunk.numel()).copy_(chunk);
      }
    }
    zero_unfilled(layout, parts, filled);
    RC_ASSERT(parts.equal(expected.flatten()));
  }));
}

TEST(FlatLayout, UnpacksTheShardsOfAllRanks) {
  EXPECT_TRUE(rc::check([] {
    const auto drawn = random_case(at::kBFloat16);
    const auto& layout = drawn.layout;
    auto gathered = at::full({layout.ranks * layout.part_bytes / 2}, 7.0, at::kBFloat16);
    std::vector<int64_t> offsets;
    int64_t bytes = 0;
    for (size_t i = 0; i < layout.entries.size(); ++i) {
      offsets.push_back(bytes);
      bytes += layout.entries[i].numel() * 2;
      pack_gradient(layout, i, drawn.gradients[i], gathered, false);
    }
    auto whole = at::full({bytes / 2}, 9.0, at::kBFloat16);
    unpack_parts(layout, gathered, whole, offsets);
    compact_first(layout, gathered);
    RC_ASSERT(gathered.narrow(0, 0, layout.entries[0].numel()).equal(drawn.gradients[0].flatten()));
    for (size_t i = 0; i < layout.entries.size(); ++i) {
      const auto values = whole.narrow(0, offsets[i] / 2, layout.entries[i].numel());
      RC_ASSERT(values.equal(drawn.gradients[i].flatten()));
    }
  }));
}

TEST(FlatLayout, OffsetsInElementsDoNotDependOnTheDtype) {
  FlatLayout narrow(3), wide(3);
  for (const int64_t rows : {7, 1, 64, 3}) {
    narrow.append(rows, 5, 2);
    wide.append(rows, 5, 4);
  }
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(wide.entries[i].offset, 2 * narrow.entries[i].offset);
  EXPECT_EQ(wide.part_bytes, 2 * narrow.part_bytes);
  EXPECT_EQ(wide.entries[1].rows_on(0), 1);
  EXPECT_EQ(wide.entries[1].rows_on(2), 0);
}

TEST(BufferPool, ReusesFreedMemory) {
  BufferPool pool;
  std::set<const void*> first, second;
  {
    const auto buffer = pool.empty(1000, at::kFloat, at::kCPU);
    const auto beside = pool.empty(1000, at::kFloat, at::kCPU);
    first = {buffer.const_data_ptr(), beside.const_data_ptr()};
  }
  EXPECT_EQ(first.size(), 2U);
  const auto again = pool.empty(900, at::kFloat, at::kCPU);
  const auto other = pool.empty(900, at::kFloat, at::kCPU);
  second = {again.const_data_ptr(), other.const_data_ptr()};
  EXPECT_EQ(second, first);
}

TEST(BufferPool, DoesNotWasteALargeBlockOnASmallBuffer) {
  BufferPool pool;
  const void* const large = pool.empty(1 << 20, at::kFloat, at::kCPU).const_data_ptr();
  const auto small = pool.empty(16, at::kFloat, at::kCPU);
  EXPECT_NE(small.const_data_ptr(), large);
  EXPECT_EQ(pool.empty(1 << 20, at::kFloat, at::kCPU).const_data_ptr(), large);
}

TEST(BufferPool, BuffersOutliveThePool) {
  auto pool = std::make_unique<BufferPool>();
  auto buffer = pool->empty(100, at::kFloat, at::kCPU);
  pool.reset();
  buffer.fill_(3);
  EXPECT_EQ(buffer.sum().item<float>(), 300);
}

}  // namespace
}  // namespace tessera
