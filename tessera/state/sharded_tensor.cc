#include "tessera/state/sharded_tensor.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/torch/box_cover.h"
#include "tessera/state/state_message.h"

namespace tessera {
namespace {

// The metadata of the shards of all ranks, from one exchange. Every rank has the same metadata and finds the same
// faults, so all ranks throw or none does.
struct GatheredShardMetadata {
  std::vector<DcpChunk> boxes;    // of all ranks, rank after rank
  std::vector<size_t> holders;    // rank in the group of each box
  std::vector<int64_t> elements;  // number of elements of each rank
  bool any_on_accelerator = false;
  std::string fault;  // first fault in a shard of one rank, or between two ranks; empty when there is none
};

StateValue to_list(const std::vector<int64_t>& numbers) { return StateList(numbers.begin(), numbers.end()); }

std::vector<int64_t> to_numbers(const StateValue& list) {
  std::vector<int64_t> out;
  for (const auto& item : list.list()) out.push_back(item.integer());
  return out;
}

std::string fault_of(const LocalShard& shard, c10::ScalarType dtype) {
  const auto& [offsets, sizes, placement] = shard.metadata;
  if (!shard.tensor.defined() || is_dtensor(shard.tensor) || shard.tensor.is_meta()) {
    return "is not a plain tensor with values";
  }
  if (shard.tensor.sizes() != c10::IntArrayRef(sizes)) {
    return fmt::format("has shape [{}], but its metadata says [{}]", fmt::join(shard.tensor.sizes(), ", "),
                       fmt::join(sizes, ", "));
  }
  if (shard.tensor.scalar_type() != dtype) {
    return fmt::format("has dtype {}, the whole tensor {}", c10::toString(shard.tensor.scalar_type()),
                       c10::toString(dtype));
  }
  return "";
}

std::string describe_shards(const ShardedTensor& tensor) {
  StateList boxes;
  std::string fault;
  bool on_accelerator = false;
  for (const auto& shard : tensor.local_shards) {
    if (fault.empty()) fault = fault_of(shard, tensor.dtype);
    on_accelerator |= shard.tensor.defined() && !shard.tensor.is_cpu() && !shard.tensor.is_meta();
    boxes.emplace_back(StateList{to_list(shard.metadata.shard_offsets), to_list(shard.metadata.shard_sizes)});
  }
  return encode_state(StateDict{{"size", to_list(tensor.size)},
                                {"dtype", c10::toString(tensor.dtype)},
                                {"boxes", std::move(boxes)},
                                {"fault", fault},
                                {"accelerator", on_accelerator}});
}

GatheredShardMetadata all_gather_shard_metadata(const ShardedTensor& tensor) {
  GatheredShardMetadata all;
  const auto messages = comm::all_gather_bytes(*tensor.group, describe_shards(tensor));
  std::optional<StateDict> first;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const StateDict rank_metadata = decode_state(messages[rank]).dict();
    if (!first) first = rank_metadata;
    int64_t elements = 0;
    for (const auto& box : rank_metadata.at("boxes").list()) {
      all.boxes.push_back({to_numbers(box.list().at(0)), to_numbers(box.list().at(1))});
      all.holders.push_back(rank);
      elements += c10::multiply_integers(all.boxes.back().sizes);
    }
    all.elements.push_back(elements);
    all.any_on_accelerator |= std::get<bool>(rank_metadata.at("accelerator").variant());
    if (!all.fault.empty()) continue;
    const auto& fault = rank_metadata.at("fault").string();
    if (!fault.empty()) all.fault = fmt::format("a shard of rank {} {}", rank, fault);
    if (to_numbers(rank_metadata.at("size")) != to_numbers(first->at("size")) ||
        rank_metadata.at("dtype").string() != first->at("dtype").string()) {
      all.fault = fmt::format("rank 0 has it as {} [{}], rank {} as {} [{}]", first->at("dtype").string(),
                              fmt::join(to_numbers(first->at("size")), ", "), rank, rank_metadata.at("dtype").string(),
                              fmt::join(to_numbers(rank_metadata.at("size")), ", "));
    }
  }
  return all;
}

// Returns why the shards of all ranks do not hold each element exactly once, or an empty text when they do. Boxes that
// are inside the tensor, do not overlap, and have as many elements as the tensor cover it completely.
std::string layout_fault(const std::vector<int64_t>& size, const GatheredShardMetadata& all) {
  const auto place = [&](size_t box) {
    return fmt::format("at [{}] of [{}]", fmt::join(all.boxes[box].offsets, ", "),
                       fmt::join(all.boxes[box].sizes, ", "));
  };
  int64_t covered_elements = 0;
  for (size_t i = 0; i < all.boxes.size(); ++i) {
    if (!is_chunk_inside(all.boxes[i], size)) {
      return fmt::format("a shard of rank {} {} reaches beyond [{}]", all.holders[i], place(i), fmt::join(size, ", "));
    }
    covered_elements += c10::multiply_integers(all.boxes[i].sizes);
  }
  if (const auto pair = find_overlap(all.boxes, "[state.all_gather_sharded_tensor] a ShardedTensor")) {
    return fmt::format("shards of ranks {} and {} overlap: {}, {}", all.holders[pair->first], all.holders[pair->second],
                       place(pair->first), place(pair->second));
  }
  const int64_t expected_elements = c10::multiply_integers(size);
  if (covered_elements == expected_elements) return "";
  return fmt::format("the shards of all ranks hold {} of {} elements", covered_elements, expected_elements);
}

// Returns the device of a rank: its rank modulo the number of devices that this process sees.
c10::Device accelerator_of(int rank, c10::DeviceType type) {
  const int seen = std::max<int>(1, c10::impl::VirtualGuardImpl(type).deviceCount());
  return {type, static_cast<c10::DeviceIndex>(rank % seen)};
}

// Returns the device of the all-gather. All ranks must use the same kind of device, so a rank without a shard uses its
// accelerator when another rank has a shard on one.
c10::Device gathering_device(const comm::Group& group, c10::Device home, bool any_on_accelerator) {
  if (!home.is_cpu() || !any_on_accelerator) return home;
  return accelerator_of(group.ranks()[static_cast<size_t>(group.rank())], group.context().accelerator_type);
}

// Returns this rank's elements, shard after shard, as bytes. The result is padded with zeros to `elements` elements.
at::Tensor packed(const ShardedTensor& tensor, int64_t elements, at::TensorOptions options) {
  std::vector<at::Tensor> pieces;
  int64_t own = 0;
  for (const auto& shard : tensor.local_shards) {
    pieces.push_back(shard.tensor.detach().to(options.device()).reshape({-1}));
    own += shard.tensor.numel();
  }
  if (pieces.empty() || own < elements) pieces.push_back(at::zeros({elements - own}, options));
  return at::cat(pieces).view(c10::kByte);
}

}  // namespace

std::string shard_placement(const comm::Group& group, int position, c10::Device device) {
  const int rank = group.ranks()[static_cast<size_t>(position)];
  return fmt::format("rank:{}/{}", rank, device.is_cpu() ? "cpu" : accelerator_of(rank, device.type()).str());
}

std::shared_ptr<ShardedTensor> chunk_sharded_tensor(const at::Tensor& full, const std::shared_ptr<comm::Group>& group) {
  TESSERA_CHECK(group, ErrorKind::kShape, "[state.chunk_sharded_tensor] found no group");
  TESSERA_CHECK(full.defined() && full.dim() > 0 && !is_dtensor(full), ErrorKind::kShape,
                "[state.chunk_sharded_tensor] found {}, wanted a plain tensor with at least one dim",
                !full.defined()   ? "an undefined tensor"
                : full.dim() == 0 ? "a tensor without dims"
                                  : "a DTensor");
  const c10::NoGradGuard no_grad;
  // Chunks of ceil(rows / ranks), as torch.chunk: the last chunks may be short or missing.
  const int64_t rows = full.size(0), chunk = (rows + group->size() - 1) / group->size();
  const int64_t first = std::min(rows, chunk * group->rank());
  const at::Tensor own = full.detach().narrow(0, first, std::min(chunk, rows - first));
  return chunks_of_ranks(own.clone(c10::MemoryFormat::Contiguous), full.sizes(), group);
}

std::shared_ptr<ShardedTensor> chunks_of_ranks(const at::Tensor& own, at::IntArrayRef size,
                                               const std::shared_ptr<comm::Group>& group) {
  auto out = std::make_shared<ShardedTensor>();
  out->size = size.vec();
  out->dtype = own.scalar_type();
  out->group = group;
  const int64_t rows = size[0], chunk = (rows + group->size() - 1) / group->size();
  for (int rank = 0; rank < group->size() && chunk * rank < rows; ++rank) {
    ShardMetadata metadata{.shard_offsets = std::vector<int64_t>(size.size(), 0),
                           .shard_sizes = out->size,
                           .placement = shard_placement(*group, rank, own.device())};
    metadata.shard_offsets[0] = chunk * rank;
    metadata.shard_sizes[0] = std::min(chunk, rows - chunk * rank);
    if (rank == group->rank()) out->local_shards.push_back({own.view(metadata.shard_sizes), metadata});
    out->shards_metadata.push_back(std::move(metadata));
  }
  return out;
}

at::Tensor all_gather_sharded_tensor(const ShardedTensor& tensor) {
  TESSERA_CHECK(tensor.group, ErrorKind::kShape, "[state.all_gather_sharded_tensor] the tensor has no group");
  const c10::NoGradGuard no_grad;
  auto all = all_gather_shard_metadata(tensor);
  if (all.fault.empty()) all.fault = layout_fault(tensor.size, all);
  TESSERA_CHECK(all.fault.empty(), ErrorKind::kShape,
                "[state.all_gather_sharded_tensor] {} [{}]: {}. Each element must be in one shard of one rank.",
                c10::toString(tensor.dtype), fmt::join(tensor.size, ", "), all.fault);
  const auto home = tensor.local_shards.empty() ? c10::Device(c10::kCPU) : tensor.local_shards.front().tensor.device();
  const auto device = gathering_device(*tensor.group, home, all.any_on_accelerator);
  const auto options = at::TensorOptions().dtype(tensor.dtype).device(device);
  if (c10::multiply_integers(tensor.size) == 0) return at::empty(tensor.size, options).to(home);

  // One all-gather with equal counts: each rank sends as many elements as the largest rank has. Rank r's elements start
  // at r * max_elements, and its boxes follow each other in the order of its metadata.
  const int64_t max_elements = std::ranges::max(all.elements);
  const at::Tensor gathered = at::empty({max_elements * tensor.group->size()}, options);
  comm::all_gather_into(*tensor.group, gathered.view(c10::kByte), packed(tensor, max_elements, options),
                        "all_gather_sharded_tensor")
      .wait();
  at::Tensor whole = at::empty(tensor.size, options);  // allocated after the send buffer was freed
  std::vector<int64_t> taken(tensor.group->size(), 0);
  for (size_t i = 0; i < all.boxes.size(); ++i) {
    const auto& [offsets, sizes] = all.boxes[i];
    at::Tensor place = whole;
    for (size_t d = 0; d < sizes.size(); ++d) place = place.narrow(static_cast<int64_t>(d), offsets[d], sizes[d]);
    const int64_t count = c10::multiply_integers(sizes);
    const size_t holder = all.holders[i];
    place.copy_(gathered.narrow(0, max_elements * static_cast<int64_t>(holder) + taken[holder], count).view(sizes));
    taken[holder] += count;
  }
  return whole.to(home);
}

}  // namespace tessera
