// The vector instructions with which the loops of this layer run: those of the processor, or fewer.
#pragma once

#include <optional>

namespace tessera::kernels {

enum class VectorLevel { kPlain, kAvx2, kAvx512 };  // each level includes the levels before it

// The level in use: that of a VectorLevelGuard of this thread, else the level that ranks agreed on, else
// TESSERA_ROW_KERNELS=plain|avx2|avx512, else the processor's. Error kConfig for another value of the variable or a
// level that the processor does not support.
VectorLevel vector_level();
// Sets the level of this process from now on. The processor must support it.
void set_vector_level(VectorLevel level);

// For tests: the loops of this thread run with `level` while the object lives. Error kConfig for a level that the
// processor does not support.
class VectorLevelGuard {
 public:
  explicit VectorLevelGuard(VectorLevel level);
  ~VectorLevelGuard();
  VectorLevelGuard(const VectorLevelGuard&) = delete;
  VectorLevelGuard& operator=(const VectorLevelGuard&) = delete;

 private:
  std::optional<VectorLevel> before_;
};
// The highest level that this processor supports.
VectorLevel max_vector_level();

}  // namespace tessera::kernels
