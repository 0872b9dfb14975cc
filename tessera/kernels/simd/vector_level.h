// Which vector instructions the loops of this layer are compiled for and run with: those of the processor, or fewer.
#pragma once

#include <optional>

namespace tessera::kernels {

enum class VectorLevel { kPlain, kAvx2, kAvx512 };  // each has what those before it have

// What this processor can, or what TESSERA_ROW_KERNELS=plain|avx2|avx512 asks for; or less, as ranks have agreed. Error
// kConfig for any other value, and for what the processor cannot do.
VectorLevel vector_level();
// From now on, for the process. No more than the processor can.
void set_vector_level(VectorLevel level);

// For tests: the loops of this thread run with `level` while it lives. Error kConfig for more than the processor can.
class UseVectorLevel {
 public:
  explicit UseVectorLevel(VectorLevel level);
  ~UseVectorLevel();
  UseVectorLevel(const UseVectorLevel&) = delete;
  UseVectorLevel& operator=(const UseVectorLevel&) = delete;

 private:
  std::optional<VectorLevel> before_;
};
VectorLevel most_of_processor();

}  // namespace tessera::kernels
