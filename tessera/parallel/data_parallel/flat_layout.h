// The layout of a flat communication buffer: the offset of each parameter's padded chunk inside one rank's part.
//
// The output of an all-gather, and the input of a reduce-scatter, is a buffer of `ranks` parts. Part r holds the chunks
// of all parameters in order. The chunk of a parameter is its rows [r*chunk_rows, (r+1)*chunk_rows), with padding after
// the parameter's last row. Chunks start at multiples of 64 elements, so an offset counted in elements does not depend
// on the dtype. All offsets here are in bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace tessera {

struct FlatLayoutEntry {
  int64_t rows = 0;        // of the unsharded parameter
  int64_t chunk_rows = 0;  // ceil(rows / ranks)
  int64_t row_numel = 0;   // elements in a row
  int64_t itemsize = 0;    // bytes of an element
  int64_t offset = 0;      // of the chunk, inside a part

  int64_t row_bytes() const { return row_numel * itemsize; }
  int64_t chunk_bytes() const { return chunk_rows * row_bytes(); }
  int64_t numel() const { return rows * row_numel; }
  int64_t rows_on(int64_t rank) const;  // rows that the rank holds, without padding; 0 after the last row
};

struct FlatLayout {
  int64_t ranks = 1;
  int64_t part_bytes = 0;
  std::vector<FlatLayoutEntry> entries;

  explicit FlatLayout(int64_t ranks) : ranks(ranks) {}
  // Adds a parameter to the layout: one chunk of its rows at the end of the part of each rank.
  void append(int64_t rows, int64_t row_numel, int64_t itemsize);
  // Adds room for `numel` elements at the end of each rank's part of the buffer. Returns the offset of this room inside
  // a part, in bytes.
  int64_t append_extra(int64_t numel, int64_t itemsize);
};

// Copies the parameters from `gathered` (ranks * part_bytes) to `unsharded_offsets` in `whole`, starting with parameter
// `first`, which must be 0 on an accelerator. On an accelerator the padding is copied, too: ranks * chunk_bytes() for
// each parameter.
void unpack_parts(const FlatLayout& layout, const at::TensorBase& gathered, const at::TensorBase& whole,
                  const std::vector<int64_t>& unsharded_offsets, size_t first = 0);
// Moves the chunks of the first parameter to the start of `gathered` without gaps, which overwrites the data between
// the chunks. CPU only.
void compact_first(const FlatLayout& layout, const at::TensorBase& gathered);
// Splits the gradient of one whole parameter, entry `index` of the layout, into one chunk per rank, and copies chunk r
// to its place in part r of `parts`. With `accumulate` the chunks are added to the values there. `parts` is a 1-d
// tensor of the layout's dtype that holds the parts of all ranks. Converts the dtype. Error kInternal for a gradient of
// another size.
void pack_gradient(const FlatLayout& layout, size_t index, const at::Tensor& gradient, const at::Tensor& parts,
                   bool accumulate);
// Constant tensors that pack_gradients() copies into a buffer, in the gradients' dtype and on their device. `ones`: the
// flags at the end of each part, one for each parameter; 1 means that this rank has a gradient for the parameter.
// `zeros`: the gaps between the gradients.
struct FillConstants {
  at::Tensor ones{}, zeros{};
};
// Copies the gradients of all entries, which share one dtype, to their chunks in the parts of all ranks (`parts`). Also
// writes `flags` ones at the end of each part, into the room that append_extra() added, and zeroes the gaps between the
// gradients. On an accelerator this is one kernel. fill: constants that the caller keeps for later calls on the same
// stream.
void pack_gradients(const FlatLayout& layout, const std::vector<at::Tensor>& gradients, int64_t flags,
                    const at::Tensor& parts, FillConstants& fill);
// In `parts`, which holds the parts of all ranks, zeroes the padding, and the chunk of each entry i for which filled[i]
// is false.
void zero_unfilled(const FlatLayout& layout, const at::Tensor& parts, const std::vector<bool>& filled);

}  // namespace tessera
