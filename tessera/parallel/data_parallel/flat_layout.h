// Where each parameter's padded chunk lies inside one rank's part of a flat communication buffer.
//
// A buffer of `ranks` parts is what an all-gather fills and a reduce-scatter reads. Part r holds, for every parameter
// in order, rows [r*chunk_rows, (r+1)*chunk_rows) of it, padded behind the last row. Chunks start on multiples of 64
// elements, so offsets counted in elements do not depend on the dtype. All offsets here are bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace tessera {

struct FlatEntry {
  int64_t rows = 0;        // of the whole parameter
  int64_t chunk_rows = 0;  // ceil(rows / ranks)
  int64_t row_numel = 0;   // elements in a row
  int64_t itemsize = 0;
  int64_t offset = 0;  // of the chunk, inside a part

  int64_t row_bytes() const { return row_numel * itemsize; }
  int64_t chunk_bytes() const { return chunk_rows * row_bytes(); }
  int64_t numel() const { return rows * row_numel; }
  int64_t rows_on(int64_t rank) const;  // without padding; 0 behind the last row
};

struct FlatLayout {
  int64_t ranks = 1;
  int64_t part_bytes = 0;
  std::vector<FlatEntry> entries;

  explicit FlatLayout(int64_t ranks) : ranks(ranks) {}
  void append(int64_t rows, int64_t row_numel, int64_t itemsize);
  // Room for `numel` more elements at the end of each part; returns its offset.
  int64_t append_extra(int64_t numel, int64_t itemsize);
};

// Writes the parameters that `gathered` (ranks * part_bytes) holds, from number `first` on (on the CPU; elsewhere all),
// to their offsets in `whole`. An accelerator writes their padding as well, ranks * chunk_bytes() each.
void unpack_parts(const FlatLayout& layout, const at::TensorBase& gathered, const at::TensorBase& whole,
                  const std::vector<int64_t>& whole_offsets, size_t first = 0);
// Moves the chunks of the first parameter together at the start of `gathered`, over what lies between. CPU only.
void compact_first(const FlatLayout& layout, const at::TensorBase& gathered);
// Copies (or adds, converting) a gradient of a whole parameter to its chunks in all parts of `parts`, a flat tensor
// of the layout's dtype.
void pack_gradient(const FlatLayout& layout, size_t index, const at::Tensor& gradient, const at::Tensor& parts,
                   bool accumulate);
// What lies between and behind gradients in a buffer, of their dtype and on their device.
struct FlatFill {
  at::Tensor ones{}, zeros{};
};
// Copies the gradients of all entries, of one dtype, to their chunks in all parts, behind them `flags` ones to each
// part as append_extra made room for, and zeroes the rest: one kernel on an accelerator, which need not write them
// apart. fill: kept by the caller for further calls on the same stream, which make none then.
void pack_gradients(const FlatLayout& layout, const std::vector<at::Tensor>& gradients, int64_t flags,
                    const at::Tensor& parts, FlatFill& fill);
// Zeroes padding, and the chunks of entries whose `filled` is false, in all parts.
void zero_unfilled(const FlatLayout& layout, const at::Tensor& parts, const std::vector<bool>& filled);

}  // namespace tessera
