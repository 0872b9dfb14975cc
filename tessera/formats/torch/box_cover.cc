#include "tessera/formats/torch/box_cover.h"

#include <algorithm>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/formats/detail/boxes.h"

namespace tessera {
namespace {

// Limits of the memory and time of the checks below, which find boxes that overlap or leave gaps. Error kFormat when a
// limit is exceeded. CornerSum stores at most kMaxCoordinates numbers, plus kMaxCoordinatesPerBox for each box. A box
// that is cut along 5 dimensions has 2^5 corners of 5 coordinates, which are 160 numbers and fewer than
// kMaxCoordinatesPerBox; so any number of such boxes can be checked. find_overlap() makes at most kMaxComparisons
// comparisons.
constexpr size_t kMaxCoordinates = size_t{1} << 21;
constexpr size_t kMaxCoordinatesPerBox = 256;
constexpr uint64_t kMaxComparisons = uint64_t{1} << 26;

bool is_empty_box(const DcpChunk& box) { return std::ranges::find(box.sizes, 0) != box.sizes.end(); }

// Counts by inclusion and exclusion. The number of boxes that hold an element equals the sum of the signs of all
// corners that are at or before the element in every dimension. A corner has sign + when an even number of its
// coordinates are ends of its box, else sign -. The tensor itself is added with the opposite sign. So the boxes cover
// the tensor exactly once if and only if the signs at every point add up to 0. At the first point in row-major order
// with another sum, no corner before it contributes, so this sum is the error of the element's count.
//
// A dimension in which every box has the size of the tensor is left out: it adds equal coordinates to all corners.
class CornerSum {
 public:
  CornerSum(std::span<const int64_t> size, std::span<const DcpChunk> boxes, const std::string& where) : size_(size) {
    for (size_t dim = 0; dim < size.size(); ++dim) {
      const bool whole = std::ranges::all_of(
          boxes, [&](const DcpChunk& box) { return is_empty_box(box) || box.sizes[dim] == size[dim]; });
      if (!whole) cut_dims_.push_back(dim);
    }
    const size_t dims = cut_dims_.size();
    const size_t max_coordinates = kMaxCoordinates + kMaxCoordinatesPerBox * boxes.size();
    TESSERA_CHECK(dims < 24 && ((boxes.size() + 1) << dims) * dims <= max_coordinates, ErrorKind::kFormat,
                  "[dcp] {}: {} chunks that are cut along {} dimensions are too many to check", where, boxes.size(),
                  dims);
    const DcpChunk whole{std::vector<int64_t>(size.size(), 0), {size.begin(), size.end()}};
    add(whole, -1);
    for (const auto& box : boxes) {
      if (!is_empty_box(box)) add(box, 1);
    }
  }

  std::optional<CoverDefect> first_defect() {
    const size_t dims = cut_dims_.size();
    std::vector<size_t> order(signs_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    const auto point = [&](size_t corner) { return points_.begin() + static_cast<std::ptrdiff_t>(corner * dims); };
    const auto length = static_cast<std::ptrdiff_t>(dims);
    std::ranges::sort(order, [&](size_t a, size_t b) {
      return std::lexicographical_compare(point(a), point(a) + length, point(b), point(b) + length);
    });
    for (size_t first = 0; first < order.size();) {
      int64_t sum = 0;
      size_t next = first;
      while (next < order.size() && std::equal(point(order[first]), point(order[first]) + length, point(order[next]))) {
        sum += signs_[order[next++]];
      }
      if (sum != 0) {
        CoverDefect defect{std::vector<int64_t>(size_.size(), 0), 1 + sum};
        for (size_t i = 0; i < dims; ++i) defect.element[cut_dims_[i]] = point(order[first])[static_cast<long>(i)];
        return defect;
      }
      first = next;
    }
    return std::nullopt;
  }

 private:
  void add(const DcpChunk& box, int sign) {
    const size_t dims = cut_dims_.size();
    for (size_t corner = 0; corner < size_t{1} << dims; ++corner) {
      int corner_sign = sign;
      for (size_t i = 0; i < dims; ++i) {
        const bool end = corner >> i & 1;
        points_.push_back(box.offsets[cut_dims_[i]] + (end ? box.sizes[cut_dims_[i]] : 0));
        if (end) corner_sign = -corner_sign;
      }
      signs_.push_back(static_cast<int8_t>(corner_sign));
    }
  }

  std::span<const int64_t> size_;
  std::vector<size_t> cut_dims_;  // dimensions in which at least one box is smaller than the tensor
  std::vector<int64_t> points_;   // cut_dims_.size() coordinates for each corner
  std::vector<int8_t> signs_;
};

// Returns the dimension in which the boxes have the most distinct begins. A sweep along this dimension compares the
// fewest pairs of boxes.
size_t sweep_dim(std::span<const DcpChunk> boxes) {
  size_t best = 0, most_distinct = 0;
  for (size_t dim = 0; dim < boxes[0].offsets.size(); ++dim) {
    std::vector<int64_t> starts;
    for (const auto& box : boxes) starts.push_back(box.offsets[dim]);
    std::ranges::sort(starts);
    const auto distinct = static_cast<size_t>(std::unique(starts.begin(), starts.end()) - starts.begin());
    if (distinct > most_distinct) best = dim, most_distinct = distinct;
  }
  return best;
}

}  // namespace

std::optional<CoverDefect> find_cover_defect(std::span<const int64_t> size, std::span<const DcpChunk> boxes,
                                             const std::string& where) {
  if (std::ranges::find(size, 0) != size.end()) return std::nullopt;
  return CornerSum(size, boxes, where).first_defect();
}

bool is_chunk_inside(const DcpChunk& box, std::span<const int64_t> size) {
  return detail::is_box_inside(box.offsets, box.sizes, {size.data(), size.size()});
}

// Sorts the boxes by their begins in one dimension and visits them in this order. `open` holds the visited boxes whose
// range in that dimension contains the begin of the current box; the current box can overlap only with boxes in `open`.
std::optional<std::pair<size_t, size_t>> find_overlap(std::span<const DcpChunk> boxes, const std::string& where) {
  std::vector<size_t> order;
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!is_empty_box(boxes[i])) order.push_back(i);
  }
  if (order.size() < 2) return std::nullopt;
  if (boxes[0].sizes.empty()) return std::pair{order[0], order[1]};
  const size_t dim = sweep_dim(boxes);
  std::ranges::sort(order, [&](size_t a, size_t b) { return boxes[a].offsets[dim] < boxes[b].offsets[dim]; });
  std::vector<size_t> open;  // indices of boxes that are not behind the sweep
  uint64_t comparisons = 0;
  for (const size_t box : order) {
    std::erase_if(open, [&](size_t other) {
      return boxes[other].offsets[dim] + boxes[other].sizes[dim] <= boxes[box].offsets[dim];
    });
    comparisons += open.size();
    TESSERA_CHECK(comparisons <= kMaxComparisons, ErrorKind::kFormat,
                  "{}: {} chunks have so many common ranges that they are too many to check", where, boxes.size());
    for (const size_t other : open) {
      if (detail::boxes_overlap(boxes[other].offsets, boxes[other].sizes, boxes[box].offsets, boxes[box].sizes)) {
        return std::pair{std::min(other, box), std::max(other, box)};
      }
    }
    open.push_back(box);
  }
  return std::nullopt;
}

}  // namespace tessera
