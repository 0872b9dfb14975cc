#include "tessera/parallel/data_parallel/flat_layout.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/split_with_sizes_copy.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/files/copy_bytes.h"

namespace tessera {
namespace {

constexpr int64_t kAlignElements = 64;
// Copies on the CPU are split into segments of this size, so that threads share a large parameter.
constexpr int64_t kSegmentBytes = 1 << 20;

int64_t align(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

struct CopySegment {
  char* to;
  const char* from;
  int64_t bytes;
};

void add_segment(std::vector<CopySegment>& segments, char* to, const char* from, int64_t bytes) {
  for (int64_t done = 0; done < bytes; done += kSegmentBytes) {
    segments.push_back({to + done, from + done, std::min(kSegmentBytes, bytes - done)});
  }
}

void copy_segments(const std::vector<CopySegment>& segments) {
  at::parallel_for(0, static_cast<int64_t>(segments.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      copy_bytes(segments[i].to, segments[i].from, static_cast<size_t>(segments[i].bytes));
    }
  });
}

char* bytes_of(const at::TensorBase& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

// A 1-d tensor as bytes.
at::Tensor as_bytes(const at::TensorBase& tensor) { return at::Tensor(tensor).view(c10::kByte); }

at::ScalarType type_of_size(int64_t itemsize) {
  return itemsize == 8 ? at::kLong : itemsize == 4 ? at::kInt : itemsize == 2 ? at::kShort : at::kByte;
}

// Does the work of unpack_parts() with one split_with_sizes_copy kernel. `gathered` is read as a matrix with one row
// per rank. Each parameter is a range of columns, whose rows are its chunks in order. The gaps between parameters are
// columns, too, and are copied to scratch tensors. Elements are read as integers of the common element size, or as
// bytes.
void unpack_columns(const FlatLayout& layout, const at::Tensor& gathered, const at::Tensor& whole,
                    const std::vector<int64_t>& unsharded_offsets) {
  const auto& entries = layout.entries;
  const auto same = [&](const FlatLayoutEntry& entry) { return entry.itemsize == entries[0].itemsize; };
  const int64_t unit = std::ranges::all_of(entries, same) ? entries[0].itemsize : 1;
  const at::Tensor from = gathered.view(type_of_size(unit)).view({layout.ranks, -1});
  std::vector<int64_t> widths;
  std::vector<at::Tensor> columns;
  const auto add = [&](int64_t bytes, const at::Tensor& column) {
    if (bytes == 0) return;
    widths.push_back(bytes / unit);
    columns.push_back(column.view({layout.ranks, -1}));
  };
  const auto add_gap = [&](int64_t bytes) { add(bytes, at::empty({layout.ranks * bytes / unit}, from.options())); };
  int64_t cursor = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t bytes = entries[i].chunk_bytes();
    add_gap(entries[i].offset - cursor);
    add(bytes, whole.narrow(0, unsharded_offsets[i], layout.ranks * bytes).view(from.scalar_type()));
    cursor = entries[i].offset + bytes;
  }
  add_gap(layout.part_bytes - cursor);
  if (!columns.empty()) at::split_with_sizes_copy_out(columns, from, widths, 1);
}

void check_elements(const at::Tensor& gradient, const FlatLayoutEntry& entry) {
  TESSERA_CHECK(gradient.numel() == entry.numel(), ErrorKind::kInternal,
                "[fsdp.backward] packing a gradient: found {} elements, expected the parameter's {}", gradient.numel(),
                entry.numel());
}

}  // namespace

int64_t FlatLayoutEntry::rows_on(int64_t rank) const {
  return std::clamp<int64_t>(rows - rank * chunk_rows, 0, chunk_rows);
}

void FlatLayout::append(int64_t rows, int64_t row_numel, int64_t itemsize) {
  FlatLayoutEntry entry{rows, (rows + ranks - 1) / ranks, row_numel, itemsize, 0};
  entry.offset = align(part_bytes, kAlignElements * itemsize);
  part_bytes = entry.offset + entry.chunk_bytes();
  entries.push_back(entry);
}

int64_t FlatLayout::append_extra(int64_t numel, int64_t itemsize) {
  const int64_t offset = align(part_bytes, kAlignElements * itemsize);
  part_bytes = offset + numel * itemsize;
  return offset;
}

void unpack_parts(const FlatLayout& layout, const at::TensorBase& gathered, const at::TensorBase& whole,
                  const std::vector<int64_t>& unsharded_offsets, size_t first) {
  if (!gathered.device().is_cpu()) {
    TESSERA_CHECK(first == 0, ErrorKind::kInternal,
                  "[fsdp.gather] unpack_parts on an accelerator: found first parameter {}, expected 0", first);
    return unpack_columns(layout, as_bytes(gathered), as_bytes(whole), unsharded_offsets);
  }
  std::vector<CopySegment> segments;
  for (size_t i = first; i < layout.entries.size(); ++i) {
    const auto& entry = layout.entries[i];
    for (int64_t rank = 0; rank < layout.ranks; ++rank) {
      const int64_t bytes = entry.rows_on(rank) * entry.row_bytes();
      if (bytes == 0) continue;
      const int64_t source = rank * layout.part_bytes + entry.offset;
      const int64_t target = unsharded_offsets[i] + rank * entry.chunk_bytes();
      add_segment(segments, bytes_of(whole) + target, bytes_of(gathered) + source, bytes);
    }
  }
  copy_segments(segments);
}

// Chunk r moves from r * part_bytes down to r * chunk_bytes. Its target ends before the source of every later chunk,
// because a chunk is never larger than a part; the data it overwrites has been moved already.
void compact_first(const FlatLayout& layout, const at::TensorBase& gathered) {
  const auto& entry = layout.entries[0];
  if (entry.numel() == 0) return;
  char* data = bytes_of(gathered);
  for (int64_t rank = 1; rank < layout.ranks; ++rank) {
    std::memmove(data + rank * entry.chunk_bytes(), data + rank * layout.part_bytes,
                 static_cast<size_t>(entry.rows_on(rank) * entry.row_bytes()));
  }
}

void pack_gradient(const FlatLayout& layout, size_t index, const at::Tensor& gradient, const at::Tensor& parts,
                   bool accumulate) {
  const auto& entry = layout.entries[index];
  check_elements(gradient, entry);
  if (entry.numel() == 0) return;
  // On the CPU a plain copy of equal dtypes is a set of memory copies, shared by threads. Every other case uses tensor
  // operations, which also convert and run on accelerators.
  const at::Tensor source = gradient.contiguous();
  if (!accumulate && parts.device().is_cpu() && source.scalar_type() == parts.scalar_type()) {
    std::vector<CopySegment> segments;
    for (int64_t rank = 0; rank < layout.ranks; ++rank) {
      add_segment(segments, bytes_of(parts) + rank * layout.part_bytes + entry.offset,
                  bytes_of(source) + rank * entry.chunk_bytes(), entry.rows_on(rank) * entry.row_bytes());
    }
    return copy_segments(segments);
  }
  // The rows of `source` are split into chunks for the ranks. One strided copy (or addition) writes all chunks of full
  // size, and a second one writes the last chunk if it is shorter.
  const auto put = [accumulate](const at::Tensor& to, const at::Tensor& from) {
    accumulate ? to.add_(from) : to.copy_(from);
  };
  const int64_t full = entry.rows / entry.chunk_rows;
  const int64_t chunk = entry.chunk_rows * entry.row_numel;
  const int64_t part = layout.part_bytes / entry.itemsize;
  const int64_t offset = parts.storage_offset() + entry.offset / entry.itemsize;
  const at::Tensor flat = source.view({-1});
  if (full > 0) {
    put(parts.as_strided({full, chunk}, {part, 1}, offset), flat.narrow(0, 0, full * chunk).view({full, chunk}));
  }
  const int64_t remaining = entry.numel() - full * chunk;
  if (remaining > 0) {
    put(parts.as_strided({remaining}, {1}, offset + full * part), flat.narrow(0, full * chunk, remaining));
  }
}

// _chunk_cat splits each tensor of a list along dim 0 into one chunk per rank, pads the last chunk, and writes the
// chunks of all tensors side by side. This is the layout of `parts`. Between the gradients the list also has a tensor
// of zeros for each gap of the layout, and at its end a tensor of ones for the flags of the parameters. These tensors
// have one row per rank. All tensors of zeros are slices of `fill.zeros`, which is as wide as the widest gap.
void pack_gradients(const FlatLayout& layout, const std::vector<at::Tensor>& gradients, int64_t flags,
                    const at::Tensor& parts, FillConstants& fill) {
  struct ColumnBlock {
    int64_t first, columns;  // elements, inside a part
    at::Tensor rows;         // for all parts
  };
  const auto itemsize = static_cast<int64_t>(parts.element_size());
  const auto options = gradients[0].options();
  std::vector<ColumnBlock> blocks;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto& entry = layout.entries[i];
    check_elements(gradients[i], entry);
    if (entry.numel() == 0) continue;
    blocks.push_back({entry.offset / itemsize, entry.chunk_bytes() / itemsize,
                      gradients[i].contiguous().view({entry.rows, entry.row_numel})});
  }
  const auto fits = [&](const at::Tensor& kept, int64_t numel) {
    return kept.defined() && kept.numel() == numel && kept.scalar_type() == gradients[0].scalar_type() &&
           kept.device() == gradients[0].device();
  };
  if (!fits(fill.ones, layout.ranks * flags)) fill.ones = at::ones({layout.ranks, flags}, options);
  blocks.push_back({layout.part_bytes / itemsize - flags, flags, fill.ones});
  int64_t end = 0, widest = 0;  // end of the block before, widest gap
  for (const auto& block : blocks) {
    widest = std::max(widest, block.first - end);
    end = block.first + block.columns;
  }
  if (widest > 0 && !fits(fill.zeros, layout.ranks * widest)) fill.zeros = at::zeros({layout.ranks * widest}, options);
  std::vector<at::Tensor> rows;
  end = 0;
  for (const auto& block : blocks) {
    const int64_t gap = block.first - end;
    if (gap > 0) rows.push_back(fill.zeros.narrow(0, 0, layout.ranks * gap).view({layout.ranks, gap}));
    rows.push_back(block.rows);
    end = block.first + block.columns;
  }
  at::Tensor out = parts.view({layout.ranks, -1});
  at::_chunk_cat_out(out, rows, 0, layout.ranks);
}

// In the part of each rank, zeroes all bytes except the rows of the entries i for which filled[i] is true. The padding
// after the last row of a chunk is zeroed, too.
void zero_unfilled(const FlatLayout& layout, const at::Tensor& parts, const std::vector<bool>& filled) {
  const at::Tensor bytes = parts.device().is_cpu() ? at::Tensor() : as_bytes(parts);
  const auto zero = [&](int64_t begin, int64_t end) {
    if (begin >= end) return;
    if (bytes.defined()) {
      bytes.narrow(0, begin, end - begin).zero_();
    } else {
      std::memset(bytes_of(parts) + begin, 0, static_cast<size_t>(end - begin));
    }
  };
  for (int64_t rank = 0; rank < layout.ranks; ++rank) {
    const int64_t part = rank * layout.part_bytes;
    int64_t cursor = 0;  // everything before it is filled or zeroed
    for (size_t i = 0; i < layout.entries.size(); ++i) {
      if (!filled[i]) continue;
      const auto& entry = layout.entries[i];
      zero(part + cursor, part + entry.offset);
      cursor = entry.offset + entry.rows_on(rank) * entry.row_bytes();
    }
    zero(part + cursor, part + layout.part_bytes);
  }
}

}  // namespace tessera
