// Tests the pretend device itself: it enforces an accelerator's rules and finds code that breaks them.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tests/devices/pretend.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using PretendDevice = OnPretendDevice;

at::TensorOptions on_device() { return at::TensorOptions(at::kFloat).device(pretend_device()); }
at::Tensor counted(at::IntArrayRef sizes) { return at::arange(c10::multiply_integers(sizes), on_device()).view(sizes); }
c10::Stream side_stream() {
  return c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStreamFromGlobalPool(pretend_device());
}
void wait(c10::Stream waiting, c10::Stream behind) {
  c10::Event event(c10::kPrivateUse1);
  event.record(behind);
  event.block(waiting);
}
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST_F(PretendDevice, IsTheAcceleratorNamedPretend) {
  EXPECT_EQ(at::ones({2}, at::TensorOptions().device(c10::Device("pretend:3"))).device(), pretend_device(3));
  EXPECT_EQ(at::getAccelerator(), c10::kPrivateUse1);
}

TEST_F(PretendDevice, ValuesEqualTheCpu) {
  const at::Tensor a = at::randn({5, 7}), b = at::randn({7, 3});
  const at::Tensor x = a.to(pretend_device()), y = b.to(pretend_device());
  EXPECT_TRUE(at::equal(x.mm(y).cpu(), a.mm(b)));
  EXPECT_TRUE(at::equal((x.t() + 2).softmax(0).cpu(), (a.t() + 2).softmax(0)));
  EXPECT_TRUE(at::equal(at::cat({x, x * 2}, 1).cpu(), at::cat({a, a * 2}, 1)));
  EXPECT_EQ(std::get<1>(x.max(1)).cpu().sum().item<int64_t>(), std::get<1>(a.max(1)).sum().item<int64_t>());
  const auto turned = [](const at::Tensor& pairs) {
    return at::view_as_real(at::view_as_complex(pairs.view({-1}).narrow(0, 0, 34).view({17, 2})).conj().resolve_conj());
  };
  EXPECT_TRUE(at::equal(turned(x).cpu(), turned(a)));
}

TEST_F(PretendDevice, ViewsShareMemoryAndInPlaceOperationsWriteIt) {
  at::Tensor x = counted({4, 6});
  x.narrow(1, 2, 3).t()[1].mul_(-1);
  x.view({24}).slice(0, 0, 24, 5).zero_();
  x.unfold(1, 2, 2).select(2, 1).add_(100);
  at::Tensor wanted = at::arange(24, at::kFloat).view({4, 6});
  wanted.narrow(1, 2, 3).t()[1].mul_(-1);
  wanted.view({24}).slice(0, 0, 24, 5).zero_();
  wanted.unfold(1, 2, 2).select(2, 1).add_(100);
  EXPECT_TRUE(at::equal(x.cpu(), wanted));
  EXPECT_TRUE(x.split(2, 0)[1].is_alias_of(x));
  EXPECT_TRUE(at::equal(x.view(at::kInt).cpu(), wanted.view(at::kInt)));
}

TEST_F(PretendDevice, OutVariantsResizeTheirOutputs) {
  const at::Tensor x = counted({3, 4});
  at::Tensor small = at::empty({0}, on_device()), right = at::empty({3}, on_device());
  at::mm_out(small, x, x.t());
  at::sum_out(right, x, {1});
  EXPECT_TRUE(at::equal(small.cpu(), x.cpu().mm(x.cpu().t())));
  EXPECT_TRUE(at::equal(right.cpu(), x.cpu().sum(1)));
  at::Tensor found = at::empty({0}, on_device().dtype(at::kLong));
  at::nonzero_out(found, x > 9);
  EXPECT_EQ(found.sizes(), at::IntArrayRef({2, 2}));
  right.resize_({7}).fill_(2);
  EXPECT_EQ(right.sum().item<float>(), 14);
}

TEST_F(PretendDevice, BackwardAndForeachOperationsWork) {
  at::Tensor x = counted({4, 4}).requires_grad_(), plain = x.detach().cpu().requires_grad_();
  for (const at::Tensor& each : {x, plain}) {
    at::scaled_dot_product_attention(each.view({1, 1, 4, 4}), each.view({1, 1, 4, 4}).cos(), each.view({1, 1, 4, 4}))
        .square()
        .sum()
        .backward();
  }
  EXPECT_TRUE(at::allclose(x.grad().cpu(), plain.grad()));
  std::vector<at::Tensor> list = {at::ones({2}, on_device()), at::ones({3}, on_device())};
  at::_foreach_mul_(list, 3);
  EXPECT_EQ(at::cat(list).sum().item<float>(), 15);
}

TEST_F(PretendDevice, RequiresAGeneratorOfTheDevice) {
  const auto& generator = at::globalContext().defaultGenerator(pretend_device());
  at::Generator(generator).set_current_seed(5);
  const at::Tensor drawn = at::empty({6}, on_device()).normal_();
  EXPECT_TRUE(at::equal(drawn.cpu(), at::empty({6}).normal_(0, 1, at::detail::createCPUGenerator(5))));
  EXPECT_THAT(error_of([&] { at::empty({6}, on_device()).normal_(0, 1, at::detail::createCPUGenerator(5)); }),
              HasSubstr("a generator of cpu"));
}

TEST_F(PretendDevice, RefusesTensorsOfAnotherDevice) {
  const at::Tensor x = counted({3}), list_of = at::ones({3});
  // The error is libtorch's where libtorch iterates over the tensors, and the device's where a kernel would.
  const auto on_one_device = ::testing::AnyOf(HasSubstr("lies on the CPU"), HasSubstr("same device"));
  EXPECT_THAT(error_of([&] { x + list_of; }), on_one_device);
  EXPECT_THAT(error_of([&] { at::cat({x, list_of}); }), on_one_device);
  EXPECT_THAT(error_of([&] { at::ones({3}) += x; }), ::testing::Not(IsEmpty()));
  EXPECT_THAT(error_of([&] { x.view({1, 3}).mm(at::ones({3, 1})); }), on_one_device);
  EXPECT_THAT(error_of([&] { x + x.to(pretend_device(1)); }), on_one_device);
  EXPECT_EQ((x + at::scalar_tensor(1)).sum().item<float>(), 6);  // a scalar tensor may be on the CPU
}

using PretendDeviceDeathTest = OnPretendDevice;
TEST_F(PretendDeviceDeathTest, HostAccessToDeviceMemoryEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const at::Tensor x = counted({3});
  EXPECT_DEATH(*static_cast<volatile float*>(x.data_ptr()) = 1, "");  // sanitizers end the process in their own way
}

TEST_F(PretendDevice, FreshAndFreedMemoryIsNan) {
  constexpr int64_t kOwnSize = 70001;  // a size that no other test uses
  EXPECT_TRUE(at::empty({kOwnSize}, on_device()).isnan().all().item<bool>());
  void* const address = at::zeros({kOwnSize}, on_device()).data_ptr();
  const at::Tensor again = at::empty({kOwnSize}, on_device());
  EXPECT_EQ(again.data_ptr(), address);
  EXPECT_TRUE(again.isnan().all().item<bool>());
}

TEST_F(PretendDevice, CountsLaunchesCopiesAndHostSyncs) {
  const at::Tensor x = counted({8, 8}), ids = at::zeros({8}, at::kLong);
  const at::Tensor pinned = at::ones({8, 8}).pin_memory();
  const auto counts = [&](const std::function<void()>& call) {
    const auto before = pretend::counters(0);
    call();
    return pretend::counters(0) - before;
  };
  EXPECT_TRUE(pinned.is_pinned());
  const auto item = counts([&] { x.sum().item<float>(); });
  EXPECT_EQ(item.host_syncs, 1);
  EXPECT_EQ(item.launches, 2);
  EXPECT_EQ(item.allocations, 1);
  EXPECT_EQ(item.copies_to_host, 1);
  EXPECT_EQ(counts([&] { x.nonzero(); }).host_syncs, 1);
  const at::Tensor q = x.view({1, 2, 4, 8});
  EXPECT_EQ(counts([&] { at::scaled_dot_product_attention(q, q, q); }).launches, 1) << "attention is one kernel";
  EXPECT_EQ(counts([&] { x.masked_fill(x > 1, 0).t().reshape({-1, 4}); }).host_syncs, 0);
  const auto blocking = counts([&] { ids.to(pretend_device()); });
  EXPECT_EQ(blocking.host_syncs, 1);
  EXPECT_EQ(blocking.pageable_copies, 1);
  EXPECT_EQ(blocking.copies_to_device, 1);
  const auto staged = counts([&] { pinned.to(pretend_device(), /*non_blocking=*/true); });
  EXPECT_EQ(staged.host_syncs, 0);
  EXPECT_EQ(staged.pageable_copies, 0);
  for (int warm = 0; warm < 2; ++warm) static_cast<void>(x.mm(x));
  EXPECT_EQ(counts([&] { static_cast<void>(x.mm(x)); }).segments, 0);
}

TEST_F(PretendDevice, NonBlockingCopiesAreCompleteAfterAWait) {
  const at::Tensor x = counted({5});
  const at::Tensor host = at::empty({5}, at::TensorOptions().pinned_memory(true));
  host.copy_(x, /*non_blocking=*/true);
  EXPECT_TRUE(host.isnan().all().item<bool>());
  c10::Event event(c10::kPrivateUse1);
  event.record(c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(pretend_device()));
  event.synchronize();
  EXPECT_TRUE(at::equal(host, at::arange(5, at::kFloat)));
}

// Deliberate errors, each compared with the correct code.

void double_on_side_stream(bool waits, bool records) {
  const c10::Stream own = c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(pretend_device());
  const c10::Stream side = side_stream();
  at::Tensor x = counted({100}), y;
  {
    const c10::StreamGuard guard(side);
    if (waits) wait(side, own);
    y = x * 2;
  }
  if (records) x.record_stream(side);
  x = at::Tensor();
  wait(own, side);
  y.record_stream(own);
  EXPECT_EQ(y.sum().item<float>(), 9900);
}

TEST_F(PretendDevice, DetectsAMissingWait) {
  EXPECT_EQ(error_of([] { double_on_side_stream(true, true); }), "");
  EXPECT_THAT(error_of([] { double_on_side_stream(false, true); }), HasSubstr("nothing orders the two"));
}

// The missing wait is found after any number of launches. Memory that is used again after a free does not order the
// rest of its stream.
TEST_F(PretendDevice, DetectsAMissingWaitAfterManyLaunches) {
  const c10::Stream own = c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(pretend_device());
  const c10::Stream side = side_stream();
  at::Tensor read = counted({100}), given_back = counted({100}), y;
  wait(side, own);
  {
    const c10::StreamGuard guard(side);
    y = read * 2 + given_back;
  }
  given_back.record_stream(side);
  given_back.reset();
  at::Tensor other = counted({3});
  for (int launch = 0; launch < 400; ++launch) other.add_(1);
  static_cast<void>(counted({100}));  // uses the freed memory again
  EXPECT_THAT(error_of([&] { read.fill_(1); }), HasSubstr("nothing orders the two"));
  wait(own, side);
}

TEST_F(PretendDevice, DetectsAMissingRecordStream) {
  EXPECT_EQ(error_of([] { double_on_side_stream(true, true); }), "");
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
  double_on_side_stream(true, false);
  EXPECT_THAT(pretend::take_faults(), ::testing::ElementsAre(HasSubstr("Call record_stream")));
}

TEST_F(PretendDevice, DetectsABufferReusedTooEarly) {
  for (const bool waits : {true, false}) {
    const c10::Stream own = c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStream(pretend_device());
    const c10::Stream side = side_stream();
    at::Tensor buffer = counted({100});
    wait(side, own);
    at::Tensor y;
    {
      const c10::StreamGuard guard(side);
      y = buffer.narrow(0, 50, 50) * 2;  // still reads the upper half
    }
    buffer.record_stream(side);
    buffer.narrow(0, 0, 50).fill_(1);  // the lower half is not read
    if (waits) wait(own, side);
    const std::string error = error_of([&] { buffer.fill_(1); });
    EXPECT_EQ(error.find("nothing orders the two") == std::string::npos, waits) << error;
    wait(own, side);
    y.record_stream(own);
  }
}

TEST_F(PretendDevice, DetectsPinnedMemoryOverwrittenBeforeItWasCopied) {
  const at::Tensor host = at::ones({4}, at::TensorOptions().pinned_memory(true));
  const at::Tensor x = host.to(pretend_device(), /*non_blocking=*/true);
  host.fill_(2);
  EXPECT_EQ(x.sum().item<float>(), 4);
  EXPECT_THAT(pretend::take_faults(), ::testing::ElementsAre(HasSubstr("were overwritten")));
}

TEST_F(PretendDevice, DetectsUseAfterFree) {
  at::Tensor x = counted({70002});  // larger than the sum, which would take the block
  const at::Tensor view = x.view({2, -1});
  x.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      c10::DataPtr(x.data_ptr(), nullptr, &c10::detail::deleteNothing, pretend_device()));
  EXPECT_THAT(error_of([&] { view.sum(); }), HasSubstr("freed"));
}

}  // namespace
}  // namespace tessera::testing
