// Test of a torch.save file beyond 4 GiB, which needs the ZIP64 fields. The test uses neither 4 GiB of memory nor of
// disk.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "tessera/formats/torch/torch_save.h"
#include "tessera/formats/torch/torch_save_writer.h"
#include "tests/formats/torch_pattern.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::pattern;
using testing::same_tensor;
using testing::TempFolder;

constexpr int64_t kLargeBytes = (int64_t{1} << 32) + 1000;

// Zeros that take no memory until they are written.
at::Tensor lazy_zeros() {
  void* memory =
      ::mmap(nullptr, kLargeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return at::from_blob(
      memory, {kLargeBytes}, [](void* at) { ::munmap(at, kLargeBytes); }, at::kByte);
}

TEST(TorchLarge, FilesBeyond4GiBReadBackInTesseraAndTorch) {
  TempFolder folder;
  const auto large = lazy_zeros(), after = pattern(at::kFloat, {3, 4}, 1);
  large[-2].fill_(7);
  TorchSaveWriter writer;
  const auto first = writer.add(large), second = writer.add(after);
  const int file = ::open((folder / "large.pt").c_str(), O_WRONLY | O_CREAT | O_EXCL, 0600);
  ASSERT_GE(file, 0);
  constexpr size_t kBlock = 1 << 20;
  const std::vector<std::byte> zeros(kBlock);
  uint64_t end = 0;
  const auto length = writer.write(PickleValue::dict({{"large", first}, {"after", second}, {"n", 3}}),
                                   [&](std::span<const std::byte> bytes) {
                                     while (!bytes.empty()) {  // blocks of zeros become holes of the file
                                       const auto block = bytes.first(std::min(bytes.size(), kBlock));
                                       if (!std::equal(block.begin(), block.end(), zeros.begin())) {
                                         ASSERT_EQ(::pwrite(file, block.data(), block.size(), static_cast<off_t>(end)),
                                                   static_cast<ssize_t>(block.size()));
                                       }
                                       end += block.size();
                                       bytes = bytes.subspan(block.size());
                                     }
                                   });
  ::close(file);
  EXPECT_EQ(length, end);
  EXPECT_EQ(std::filesystem::file_size(folder / "large.pt"), length);
  const auto read = TorchSaveFile::open(folder / "large.pt");
  const auto tensor = read->tensor(*read->find_tensor(*read->root().find("large")));
  EXPECT_EQ(tensor.numel(), kLargeBytes);
  EXPECT_EQ(tensor[-2].item<int64_t>(), 7);
  EXPECT_TRUE(same_tensor(read->tensor(*read->find_tensor(*read->root().find("after"))), after));
  const auto run = testing::run_python("tests/formats/oracle/torch_oracle.py", {"large", folder.path().string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, "large file equal\n");
}

}  // namespace
}  // namespace tessera
