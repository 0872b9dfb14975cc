// Tests of ScopedModuleOffloading: models move to a device and back. The idle place is a mapped file here, so that the
// test can check on the CPU where the memory is.
#include "tessera/train/nemo/module_offloading.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <fstream>

#include "tessera/base/error.h"
#include "tessera/train/step/step.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;
using testing::TempFolder;

struct Halves : nn::Callable<Halves> {
  at::Tensor weight, twin, scale;
  explicit Halves(int64_t rows = 4, int64_t columns = 8) {
    const auto value = at::arange(rows * columns, at::kFloat).view({rows, columns});
    register_parameter("weight", weight, value);
    register_parameter("twin", twin, value);  // tied
    register_buffer("scale", scale, at::full({3}, 2.0));
    weight.set_requires_grad(true);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight) * scale[0]; }
};

c10::Device kCpu = c10::kCPU;

// True if the memory at `data` belongs to a removed file that this process has mapped.
bool is_in_mapped_file(const void* data) {
  std::ifstream maps("/proc/self/maps");
  const auto address = reinterpret_cast<uintptr_t>(data);
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2 || address < begin || address >= end) continue;
    return line.find(".parked.") != std::string::npos && line.find("(deleted)") != std::string::npos;
  }
  return false;
}

TEST(ModuleOffloading, ResidentMemoryIsFreedAfterTheScope) {
  if (testing::kSanitized) GTEST_SKIP() << "freed memory is kept";
  TempFolder folder;
  Halves model(4096, 8192);  // 128 MiB
  const auto sum = model.weight.sum().item<double>();
  const OffloadLocations places{.device = kCpu, .idle_folder = folder.path()};
  const int64_t at_first = resident_bytes();
  { ScopedModuleOffloading to_file(model, true, places); }
  const int64_t mark = resident_bytes();
  EXPECT_LT(mark, at_first - (int64_t{100} << 20));
  for (int round = 0; round < 2; ++round) {
    {
      ScopedModuleOffloading here(model, true, places);
      EXPECT_GT(resident_bytes(), mark + (int64_t{120} << 20));
      EXPECT_FALSE(is_in_mapped_file(model.weight.const_data_ptr()));
    }
    EXPECT_NEAR(static_cast<double>(resident_bytes()), static_cast<double>(mark), 0.02 * static_cast<double>(mark));
    EXPECT_TRUE(is_in_mapped_file(model.weight.const_data_ptr()));
  }
  EXPECT_EQ(model.weight.sum().item<double>(), sum);
}

TEST(ModuleOffloading, KeepsHandlesValuesTiesViewsAndGradients) {
  TempFolder folder;
  Halves model;
  const auto handle = model.weight;
  const auto view = model.weight.detach().narrow(0, 1, 2);
  const auto wanted = model.weight.detach().clone();
  const auto x = at::ones({2, 8});
  const auto loss = model(x).sum();  // saves the parameter for backward
  {
    ScopedModuleOffloading here(model, true, {.device = kCpu, .idle_folder = folder.path()});
    loss.backward();
  }
  EXPECT_TRUE(model.weight.is_same(handle) && model.twin.is_same(handle));
  EXPECT_TRUE(is_in_mapped_file(handle.const_data_ptr()) && is_in_mapped_file(handle.grad().const_data_ptr()) &&
              is_in_mapped_file(model.scale.const_data_ptr()));
  EXPECT_EQ(view.const_data_ptr(), handle[1].const_data_ptr());
  EXPECT_TRUE(handle.grad().equal(at::full({4, 8}, 4.0)));
  // The idle model can be read and written.
  model.weight.detach().add_(1);
  EXPECT_TRUE(model(x).sum().equal((wanted + 1).sum() * 4));
  {
    ScopedModuleOffloading here(model, true, {.device = kCpu, .idle_folder = folder.path()});
    EXPECT_FALSE(is_in_mapped_file(handle.const_data_ptr()));
    EXPECT_TRUE(view.equal((wanted + 1).narrow(0, 1, 2)));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(ModuleOffloading, MovesBackAfterAnExceptionAndPropagatesIt) {
  TempFolder folder;
  Halves model;
  const auto raised = [&](bool enabled) {
    try {
      ScopedModuleOffloading here(model, enabled, {.device = kCpu, .idle_folder = folder.path()});
      EXPECT_FALSE(is_in_mapped_file(model.weight.const_data_ptr()));
      throw std::out_of_range("of the body");
    } catch (const std::out_of_range& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(raised(false), "of the body");
  EXPECT_FALSE(is_in_mapped_file(model.weight.const_data_ptr()));
  EXPECT_EQ(raised(true), "of the body");
  EXPECT_TRUE(is_in_mapped_file(model.weight.const_data_ptr()));
}

TEST(ModuleOffloading, ReportsAMissingFolderOrAccelerator) {
  TempFolder folder;
  Halves model;
  const auto nowhere = folder / "none";
  ScopedModuleOffloading here(model, true, {.device = kCpu, .idle_folder = nowhere});
  try {
    here.close();
    ADD_FAILURE() << "a folder that is not there was written to";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_THAT(error.what(), HasSubstr(nowhere.string()));
  }
  here.close();  // a second close() does nothing
  if (at::hasCUDA()) return;
  try {
    ScopedModuleOffloading away(model, true);
    ADD_FAILURE() << "there is no accelerator";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("no accelerator"));
  }
  ScopedModuleOffloading off(model);  // disabled: needs no accelerator
}

TEST(ModuleOffloading, MetaTensorsCannotMove) {
  struct Empty : nn::Callable<Empty> {
    at::Tensor weight;
    Empty() { register_parameter("weight", weight, at::empty({2}, at::device(at::kMeta))); }
  } empty;
  Halves model;
  const auto before = model.weight.const_data_ptr();
  move_to_device(model, c10::kCPU);
  EXPECT_EQ(model.weight.const_data_ptr(), before);
  for (const auto& [module, device] : {std::pair<nn::Module*, c10::Device>{&empty, c10::kCPU}, {&model, c10::kMeta}}) {
    try {
      move_to_device(*module, device);
      ADD_FAILURE() << "there are no values";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kShape);
      EXPECT_THAT(error.what(), HasSubstr("holds no values"));
    }
  }
  EXPECT_EQ(model.weight.const_data_ptr(), before);
}

}  // namespace
}  // namespace tessera::train
