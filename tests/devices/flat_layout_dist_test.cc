// Tests gathered parameters and packed gradients, which an accelerator copies in one kernel, against the copies of the
// CPU.
#include <rapidcheck.h>

#include "tessera/parallel/data_parallel/flat_gradients.h"
#include "tessera/parallel/data_parallel/flat_layout.h"
#include "tests/devices/pretend.h"

namespace tessera::testing {
namespace {

struct Drawn {
  FlatLayout layout{*rc::gen::inRange<int64_t>(1, 6)};
  std::vector<int64_t> padded, exact;  // offsets of unsharded parameters: padded for an accelerator, exact for the CPU
  int64_t padded_bytes = 0, exact_bytes = 0;

  explicit Drawn(bool one_type) {
    const int64_t type = *rc::gen::element<int64_t>(2, 4, 8);
    for (int64_t left = *rc::gen::inRange<int64_t>(1, 6); left > 0; --left) {
      const int64_t itemsize = one_type ? type : *rc::gen::element<int64_t>(2, 4, 8);
      layout.append(*rc::gen::inRange<int64_t>(0, 9), *rc::gen::element<int64_t>(1, 3, 64), itemsize);
      const auto& entry = layout.entries.back();
      padded.push_back(padded_bytes), exact.push_back(exact_bytes);
      padded_bytes += (layout.ranks * entry.chunk_bytes() + 511) / 512 * 512;
      exact_bytes += (entry.numel() * itemsize + 511) / 512 * 512;
    }
  }
};

TEST(PretendFlatLayout, UnpackedParametersEqualTheCpu) {
  EXPECT_TRUE(rc::check([] {
    const Drawn drawn(*rc::gen::arbitrary<bool>());
    const auto& layout = drawn.layout;
    const auto gathered = at::randint(0, 256, {layout.ranks * layout.part_bytes}, at::kByte);
    const auto here = at::zeros({drawn.exact_bytes}, at::kByte);
    const auto there = at::zeros({drawn.padded_bytes}, here.options().device(pretend_device()));
    const auto before = pretend::counters(0).launches;
    const auto moved = gathered.to(pretend_device());
    const auto copies = pretend::counters(0).launches - before;
    unpack_parts(layout, moved, there, drawn.padded);
    RC_ASSERT(pretend::counters(0).launches - before <= copies + 1);
    unpack_parts(layout, gathered, here, drawn.exact);
    const auto found = there.cpu();
    for (size_t i = 0; i < layout.entries.size(); ++i) {
      const int64_t bytes = layout.entries[i].numel() * layout.entries[i].itemsize;
      RC_ASSERT(found.narrow(0, drawn.padded[i], bytes).equal(here.narrow(0, drawn.exact[i], bytes)));
    }
  }));
}

TEST(PretendFlatLayout, PackedGradientsEqualTheCpu) {
  EXPECT_TRUE(rc::check([] {
    const auto type = *rc::gen::element(at::kFloat, at::kBFloat16);
    FlatLayout layout(*rc::gen::inRange<int64_t>(1, 6));
    std::vector<at::Tensor> here, there;
    for (int64_t left = *rc::gen::inRange<int64_t>(1, 6); left > 0; --left) {
      layout.append(*rc::gen::inRange<int64_t>(0, 9), *rc::gen::element<int64_t>(1, 3, 64), 4);
      const auto& entry = layout.entries.back();
      here.push_back(at::randn({entry.row_numel, entry.rows}, type).t());
      there.push_back(here.back().to(pretend_device()));
    }
    const auto flags = static_cast<int64_t>(here.size());
    layout.append_extra(flags, 4);
    const auto expected = at::full({layout.ranks * layout.part_bytes / 4}, 7.0, at::kFloat);
    const auto found = at::full(expected.sizes(), 7.0, expected.options().device(pretend_device()));
    for (size_t i = 0; i < here.size(); ++i) pack_gradient(layout, i, here[i], expected, false);
    zero_unfilled(layout, expected, std::vector<bool>(here.size(), true));
    expected.view({layout.ranks, -1}).slice(1, -flags).fill_(1);
    FillConstants fill;
    for (int times = 0; times < 2; ++times) {  // the second time `fill` is in use already
      found.fill_(7);
      pack_gradients(layout, there, flags, found, fill);
      RC_ASSERT(found.cpu().equal(expected));
    }
  }));
}

// Returns the buffer that ranks would sum, after three backwards in which some entries have no gradient.
std::pair<std::vector<at::Tensor>, int64_t> accumulated(const FlatLayout& layout, c10::Device device,
                                                        const std::vector<std::vector<at::Tensor>>& backwards) {
  FlatGradients flat(std::make_shared<BufferPool>());
  flat.open(layout, at::kFloat, device, nullptr);
  const auto before = device.is_cpu() ? 0 : pretend::counters(0).launches;
  for (const auto& each : backwards) {
    std::vector<at::Tensor> gradients;
    for (const auto& gradient : each) gradients.push_back(gradient.defined() ? gradient.to(device) : at::Tensor());
    flat.add_all(std::move(gradients));
  }
  const auto sum = flat.close(2);
  const auto launches = device.is_cpu() ? 0 : pretend::counters(0).launches - before;
  std::vector<at::Tensor> found(layout.entries.size());
  const auto part = sum.numel() / layout.ranks;
  for (int64_t rank = 0; rank < layout.ranks; ++rank) {
    flat.unpack(sum.narrow(0, rank * part, part), rank, at::kFloat, [&](size_t i, const at::Tensor& values) {
      found[i] = found[i].defined() ? at::cat({found[i], values.cpu()}) : values.cpu().clone();
    });
  }
  return {found, launches};
}

TEST(PretendFlatLayout, AccumulatedGradientsEqualTheCpu) {
  EXPECT_TRUE(rc::check([] {
    FlatLayout layout(*rc::gen::inRange<int64_t>(1, 6));
    const auto count = *rc::gen::inRange<size_t>(1, 6);
    for (size_t i = 0; i < count; ++i) {
      layout.append(*rc::gen::inRange<int64_t>(1, 9), *rc::gen::element<int64_t>(1, 3, 64), 4);
    }
    const bool all = *rc::gen::arbitrary<bool>();
    std::vector<std::vector<at::Tensor>> backwards(3);
    for (auto& each : backwards) {
      for (const auto& entry : layout.entries) {
        const bool none = !all && *rc::gen::inRange(0, 3) == 0;
        each.push_back(none ? at::Tensor() : at::randn({entry.rows, entry.row_numel}));
      }
    }
    const auto [here, nothing] = accumulated(layout, at::kCPU, backwards);
    const auto [there, launches] = accumulated(layout, pretend_device(), backwards);
    for (size_t i = 0; i < count; ++i) {
      RC_ASSERT(here[i].defined() == there[i].defined());
      const bool same = !here[i].defined() || here[i].equal(there[i]);
      RC_ASSERT(same);
    }
    // The bound has for each backward a copy per gradient, and one launch each for ones, zeros, the packing and the
    // sum.
    const bool few = !all || launches <= static_cast<int64_t>(3 * count) + 3 * 4;
    RC_ASSERT(few);
  }));
}

}  // namespace
}  // namespace tessera::testing
