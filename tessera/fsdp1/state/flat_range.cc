#include "tessera/fsdp1/state/flat_range.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/collectives/collectives.h"

namespace tessera {
namespace {

// Collectives move bytes, so every dtype works.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view(at::kByte); }

void check_piece(const at::Tensor& piece, const FlatRange& range, std::string_view subject) {
  TESSERA_CHECK(piece.dim() == 1 && piece.numel() == range.numel(), ErrorKind::kShape,
                "[fsdp1.exchange] {}: found a piece of shape {}, expected the {} elements from {}", quote(subject),
                fmt::join(piece.sizes(), "x"), range.numel(), range.begin);
}

// Error kShape unless the ranges in `have` together contain each element of each range in `want` exactly once. Only the
// number of elements is compared. All ranks check equal arguments, so all ranks throw or none does.
void check_covered(const std::vector<FlatRange>& have, const std::vector<FlatRange>& want, std::string_view subject) {
  for (size_t rank = 0; rank < want.size(); ++rank) {
    int64_t found = 0;
    for (const auto& range : have) found += intersection(range, want[rank]).numel();
    TESSERA_CHECK(found == want[rank].numel(), ErrorKind::kShape,
                  "[fsdp1.exchange] {}: the ranks hold {} of the {} elements that rank {} of the group needs from {}, "
                  "expected each once. Give the state as it was saved.",
                  quote(subject), found, want[rank].numel(), rank, want[rank].begin);
  }
}

// `ranges` has one range per rank. Returns whether the begins of the ranges that are not empty ascend with the rank. If
// so, the parts that a rank receives from the other ranks are already in the order of their elements.
bool in_order_of_ranks(const std::vector<FlatRange>& ranges) {
  int64_t reached = 0;
  for (const auto& range : ranges) {
    if (range.empty()) continue;
    if (range.begin < reached) return false;
    reached = range.begin;
  }
  return true;
}

}  // namespace

FlatRange intersection(const FlatRange& a, const FlatRange& b) {
  const FlatRange both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.empty() ? FlatRange{} : both;
}

std::vector<FlatRange> chunk_ranges(at::IntArrayRef shape, int64_t ranks) {
  TESSERA_CHECK(!shape.empty(), ErrorKind::kShape,
                "[fsdp1.chunk] found a tensor without dims, expected one that has rows. Give it shape [1].");
  const int64_t rows = shape[0], row = numel_of(shape.slice(1)), chunk = (rows + ranks - 1) / ranks;
  std::vector<FlatRange> ranges;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t begin = std::min(rows, chunk * rank), end = std::min(rows, begin + chunk);
    ranges.push_back(begin * row == end * row ? FlatRange{} : FlatRange{begin * row, end * row});
  }
  return ranges;
}

// A box is one contiguous range if, after its leading dims of size 1 and one further dim, it covers all remaining dims
// in full.
std::optional<FlatRange> range_of_box(at::IntArrayRef shape, at::IntArrayRef offsets, at::IntArrayRef sizes) {
  if (numel_of(sizes) == 0) return FlatRange{};
  size_t cut = 0;  // the first dim with more than one index in the box
  while (cut < sizes.size() && sizes[cut] == 1) ++cut;
  for (size_t dim = cut + 1; dim < sizes.size(); ++dim) {
    if (sizes[dim] != shape[dim]) return std::nullopt;
  }
  int64_t begin = 0;
  for (size_t dim = 0; dim < sizes.size(); ++dim) begin = begin * shape[dim] + offsets[dim];
  return FlatRange{begin, begin + numel_of(sizes)};
}

std::vector<FlatRange> keep_first_holders(std::vector<FlatRange> ranges) {
  for (size_t rank = 1; rank < ranges.size(); ++rank) {
    for (size_t before = 0; before < rank; ++before) {
      if (ranges[before] == ranges[rank]) ranges[rank] = {};
    }
  }
  return ranges;
}

bool covers_once(std::vector<FlatRange> ranges, int64_t numel) {
  std::erase_if(ranges, [](const FlatRange& range) { return range.empty(); });
  std::ranges::sort(ranges, [](const auto& a, const auto& b) { return a.begin < b.begin; });
  int64_t reached = 0;
  for (const auto& range : ranges) {
    if (range.begin != reached) return false;
    reached = range.end;
  }
  return reached == numel;
}

// The elements are sent in one all-to-all. Sender and receiver both compute from `have` and `want` how many elements a
// rank sends to another, so these numbers are not sent.
at::Tensor all_to_all_ranges(comm::Group& group, const at::Tensor& piece, const std::vector<FlatRange>& have,
                             const std::vector<FlatRange>& want, std::string_view subject) {
  check_covered(have, want, subject);
  const auto ranks = static_cast<size_t>(group.size()), rank = static_cast<size_t>(group.rank());
  const FlatRange &mine = have.at(rank), &wanted = want.at(rank);
  check_piece(piece, mine, subject);
  const auto bytes = static_cast<int64_t>(piece.element_size());
  std::vector<at::Tensor> sent;
  std::vector<int64_t> sent_bytes(ranks), received_bytes(ranks);
  for (size_t other = 0; other < ranks; ++other) {
    const auto part = intersection(mine, want[other]);
    if (!part.empty()) sent.push_back(piece.narrow(0, part.begin - mine.begin, part.numel()));
    sent_bytes[other] = part.numel() * bytes;
    received_bytes[other] = intersection(have[other], wanted).numel() * bytes;
  }
  const at::Tensor input = sent.empty() ? piece.new_empty({0}) : at::cat(sent).contiguous();
  const at::Tensor received = piece.new_empty({wanted.numel()});
  comm::all_to_all_single(group, as_bytes(received), as_bytes(input), received_bytes, sent_bytes, subject).wait();
  // `received` has the parts of the wanted range in the order of the ranks that sent them. When the ranges in `have`
  // are not in the order of the ranks, the parts are copied to their places in `ordered`.
  if (in_order_of_ranks(have)) return received;
  const at::Tensor ordered = piece.new_empty({wanted.numel()});
  int64_t at = 0;
  for (size_t other = 0; other < ranks; ++other) {
    const auto part = intersection(have[other], wanted);
    if (part.empty()) continue;
    ordered.narrow(0, part.begin - wanted.begin, part.numel()).copy_(received.narrow(0, at, part.numel()));
    at += part.numel();
  }
  return ordered;
}

at::Tensor all_gather_ranges(comm::Group& group, const at::Tensor& piece, const std::vector<FlatRange>& have,
                             int64_t numel, std::string_view subject) {
  check_covered(have, {FlatRange{0, numel}}, subject);
  check_piece(piece, have.at(static_cast<size_t>(group.rank())), subject);
  const at::Tensor whole = piece.new_empty({numel});
  // One broadcast per rank, directly into its place in the result: an all-gather would need equal sizes, so it would
  // need padding and a second buffer. All broadcasts are started before the first wait.
  std::vector<comm::PendingCollective> pending;
  for (int rank = 0; rank < group.size(); ++rank) {
    const FlatRange& range = have[static_cast<size_t>(rank)];
    if (range.empty()) continue;
    const at::Tensor part = whole.narrow(0, range.begin, range.numel());
    if (rank == group.rank()) part.copy_(piece);
    pending.push_back(comm::broadcast(group, as_bytes(part), rank, subject));
  }
  for (auto& each : pending) each.wait();
  return whole;
}

}  // namespace tessera
