#include "tessera/comm/shm/backend.h"

#include <ATen/EmptyTensor.h>

#include <numeric>

#include "tessera/base/error.h"
#include "tessera/comm/group/wait_all.h"
#include "tessera/comm/shm/shared_buffer.h"

namespace tessera::comm::shm {
namespace {

using Tensors = ShmBackend::Tensors;

// The work of a coalesced call. It has ended when the works of all collectives of the call have ended.
class AllWork final : public c10d::Work {
 public:
  AllWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}
  bool isCompleted() override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    wait_all(works_, timeout);
    return true;
  }
  std::vector<at::Tensor> result() override {
    Tensors results;
    for (const auto& work : works_) {
      for (const auto& tensor : work->result()) results.push_back(tensor);
    }
    return results;
  }
  void abort() override {
    for (const auto& work : works_) work->abort();
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

void require(bool condition, const char* verb, const std::string& message) {
  TESSERA_CHECK(condition, ErrorKind::kShape, "[comm.shm] {}: {}", verb, message);
}

void require_plain(const char* verb, const at::Tensor& tensor) {
  require(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous(),
          verb, "wanted dense, contiguous tensors in CPU memory");
}

const at::Tensor& only(const char* verb, const Tensors& tensors) {
  require(tensors.size() == 1, verb, fmt::format("{} tensors, wanted one", tensors.size()));
  require_plain(verb, tensors[0]);
  return tensors[0];
}

const Tensors& only(const char* verb, const std::vector<Tensors>& lists, int size) {
  require(lists.size() == 1 && lists[0].size() == static_cast<size_t>(size), verb,
          fmt::format("wanted one list of {} tensors", size));
  for (const auto& tensor : lists[0]) require_plain(verb, tensor);
  return lists[0];
}

void require_like(const char* verb, const at::Tensor& tensor, const at::Tensor& model) {
  require(tensor.scalar_type() == model.scalar_type() && tensor.numel() == model.numel(), verb,
          fmt::format("{} elements of {}, but {} of {}", tensor.numel(), c10::toString(tensor.scalar_type()),
                      model.numel(), c10::toString(model.scalar_type())));
}

SendBuffer all_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}
ReceiveBuffer into(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

// The description that ranks compare in the first round of a call. `tensor` must have the same size on all ranks.
CallDescriptor call_of(Op kind, const at::Tensor& tensor, int64_t root = -1) {
  return {.kind = kind,
          .dtype = static_cast<int8_t>(tensor.scalar_type()),
          .root = static_cast<int32_t>(root),
          .elements = static_cast<uint64_t>(tensor.numel())};
}

CallDescriptor call_of(Op kind, const at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root = -1) {
  check_reducible(tensor.scalar_type(), op);
  CallDescriptor call = call_of(kind, tensor, root);
  call.reduce = op;
  return call;
}

// Splits a tensor of an all-to-all along its first dimension into one part per rank. `splits`: rows of each part;
// empty: equal parts.
template <class Part, class Whole>
std::vector<Part> cut(const char* name, const at::Tensor& tensor, const Whole& whole,
                      const std::vector<int64_t>& splits, int size) {
  require_plain("all_to_all", tensor);
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 0;
  const auto counts = splits.empty() ? std::vector<int64_t>(size, rows / size) : splits;
  const bool fits = counts.size() == static_cast<size_t>(size) &&
                    std::ranges::all_of(counts, [](int64_t count) { return count >= 0; }) &&
                    std::accumulate(counts.begin(), counts.end(), int64_t{0}) == rows;
  require(fits, "all_to_all",
          fmt::format("the splits of {} do not add up to its {} rows for {} ranks", name, rows, size));
  std::vector<Part> parts;
  const size_t row = rows > 0 ? tensor.nbytes() / rows : 0;
  auto* data = whole.data;
  for (const int64_t count : counts) {
    parts.push_back({data, count * row});
    data += count * row;
  }
  return parts;
}

}  // namespace

ShmBackend::ShmBackend(std::shared_ptr<SharedMemory> memory, const ChannelOptions& options, Milliseconds timeout)
    : Backend(options.rank, options.size),
      channel_(std::make_shared<Channel>(std::move(memory), options)),
      engine_(std::make_shared<Engine>(channel_)),
      timeout_(timeout) {}

ShmBackend::~ShmBackend() { ShmBackend::shutdown(); }

std::shared_ptr<c10::Allocator> ShmBackend::getMemAllocator() { return {std::shared_ptr<void>(), &shared_buffers()}; }

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  return at::detail::empty_generic({size}, &shared_buffers(), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

// All started collectives are completed before this rank leaves the group: peers may still need its data.
void ShmBackend::shutdown() {
  engine_->shut_down();
  channel_->leave();  // needed although the destructor leaves too: living works may keep the channel
}

void ShmBackend::abort() { channel_->abort_group(channel_->name_of(rank_) + " aborted the group"); }

void ShmBackend::startCoalescing() {
  require(!coalesced_, "coalescing", "it has started already");
  coalesced_.emplace();
}

ShmBackend::WorkPtr ShmBackend::endCoalescing() {
  require(coalesced_.has_value(), "coalescing", "it has not started");
  auto works = std::move(*coalesced_);
  coalesced_.reset();
  return c10::make_intrusive<AllWork>(rank_, std::move(works));
}

ShmBackend::WorkPtr ShmBackend::keep(WorkPtr work) {
  if (coalesced_) coalesced_->push_back(work);
  return work;
}

// The signature that announce() has stored in announced_ belongs only to the next collective. So start() passes it to
// `operation` and clears announced_.
ShmBackend::WorkPtr ShmBackend::start(std::unique_ptr<Operation> operation, WorkOptions options) {
  operation->set_signature(std::exchange(announced_, Signature()));
  const auto timeout = options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout;
  const auto work =
      c10::make_intrusive<CollectiveWork>(engine_, options.type, ++sequence_, std::move(operation), timeout,
                                          std::move(options.tensors), std::move(options.results));
  engine_->start(work);
  return keep(work);
}

// When a collective of start_all() throws (wrong arguments), peers may have started more of its collectives than this
// rank, and the rounds of these collectives could never complete. So the group is aborted, and the works that this rank
// has started are waited for, since they use the caller's tensors.
template <class Start>
ShmBackend::WorkPtr ShmBackend::together(const Start& start_all) {
  startCoalescing();
  try {
    start_all();
  } catch (...) {
    const auto begun = endCoalescing();
    abort();
    try {
      begun->wait();
    } catch (const std::exception&) {
    }
    throw;
  }
  return endCoalescing();
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only("broadcast", tensors);
  require(options.rootRank >= 0 && options.rootRank < size_, "broadcast", fmt::format("no rank {}", options.rootRank));
  std::vector<SendBuffer> out(size_);
  std::vector<ReceiveBuffer> in(size_);
  if (rank_ == options.rootRank) {
    for (int to = 0; to < size_; ++to) {
      if (to != rank_) out[to] = all_of(tensor);
    }
  } else {
    in[options.rootRank] = into(tensor);
  }
  return start(make_exchange(call_of(Op::kBroadcast, tensor, options.rootRank), std::move(out), std::move(in), true),
               {c10d::OpType::BROADCAST, options.timeout, tensors, tensors});
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only("all_reduce", tensors);
  return start(make_all_reduce(call_of(Op::kAllReduce, tensor, options.reduceOp), size_, tensor.mutable_data_ptr(),
                               tensor.numel()),
               {c10d::OpType::ALLREDUCE, options.timeout, tensors, tensors});
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return together([&] {
    for (const auto& tensor : tensors) {
      Tensors one = {tensor};
      allreduce(one, options);
    }
  });
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only("reduce", tensors);
  require(options.rootRank >= 0 && options.rootRank < size_, "reduce", fmt::format("no rank {}", options.rootRank));
  return start(make_reduce(call_of(Op::kReduce, tensor, options.reduceOp, options.rootRank), size_, rank_,
                           tensor.mutable_data_ptr(), tensor.numel()),
               {c10d::OpType::REDUCE, options.timeout, tensors, tensors});
}

ShmBackend::WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only("all_gather", inputs);
  std::vector<SendBuffer> out(size_, all_of(input));
  std::vector<ReceiveBuffer> in;
  Tensors used = only("all_gather", outputs, size_);
  for (const auto& output : used) {
    require_like("all_gather", output, input);
    in.push_back(into(output));
  }
  Tensors results = used;
  used.push_back(input);
  return start(make_exchange(call_of(Op::kAllGather, input), std::move(out), std::move(in), true),
               {c10d::OpType::ALLGATHER, options.timeout, std::move(used), std::move(results)});
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  require_plain("all_gather", input);
  require_plain("all_gather", output);
  require(output.scalar_type() == input.scalar_type() && output.numel() == input.numel() * size_, "all_gather",
          fmt::format("the output has {} elements, wanted {} times {}", output.numel(), size_, input.numel()));
  std::vector<SendBuffer> out(size_, all_of(input));
  std::vector<ReceiveBuffer> in;
  for (int from = 0; from < size_; ++from) {
    in.push_back({static_cast<std::byte*>(output.mutable_data_ptr()) + from * input.nbytes(), input.nbytes()});
  }
  return start(make_exchange(call_of(Op::kAllGather, input), std::move(out), std::move(in), true),
               {c10d::OpType::_ALLGATHER_BASE, options.timeout, {output, input}, {output}});
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  require(outputs.size() == inputs.size(), "all_gather", "wanted as many outputs as inputs");
  return together([&] {
    for (size_t i = 0; i < inputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
  });
}

ShmBackend::WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const at::Tensor& input = only("gather", inputs);
  require(options.rootRank >= 0 && options.rootRank < size_, "gather", fmt::format("no rank {}", options.rootRank));
  std::vector<SendBuffer> out(size_);
  std::vector<ReceiveBuffer> in(size_);
  out[options.rootRank] = all_of(input);
  Tensors used = {input}, results;
  if (rank_ == options.rootRank) {
    results = only("gather", outputs, size_);
    for (int from = 0; from < size_; ++from) {
      require_like("gather", results[from], input);
      in[from] = into(results[from]);
      used.push_back(results[from]);
    }
  }
  return start(make_exchange(call_of(Op::kGather, input, options.rootRank), std::move(out), std::move(in), true),
               {c10d::OpType::GATHER, options.timeout, std::move(used), std::move(results)});
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor& output = only("scatter", outputs);
  require(options.rootRank >= 0 && options.rootRank < size_, "scatter", fmt::format("no rank {}", options.rootRank));
  std::vector<SendBuffer> out(size_);
  std::vector<ReceiveBuffer> in(size_);
  in[options.rootRank] = into(output);
  Tensors used = {output};
  if (rank_ == options.rootRank) {
    const Tensors& parts = only("scatter", inputs, size_);
    for (int to = 0; to < size_; ++to) {
      require_like("scatter", parts[to], output);
      out[to] = all_of(parts[to]);
      used.push_back(parts[to]);
    }
  }
  return start(make_exchange(call_of(Op::kScatter, output, options.rootRank), std::move(out), std::move(in), false),
               {c10d::OpType::SCATTER, options.timeout, std::move(used), outputs});
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  const Tensors& list = only("reduce_scatter", inputs, size_);
  std::vector<const void*> parts;
  Tensors used = {output};
  for (const auto& part : list) {
    require_like("reduce_scatter", part, output);
    parts.push_back(part.const_data_ptr());
    used.push_back(part);
  }
  return start(make_reduce_scatter(call_of(Op::kReduceScatter, output, options.reduceOp), output.mutable_data_ptr(),
                                   std::move(parts), output.numel()),
               {c10d::OpType::REDUCE_SCATTER, options.timeout, std::move(used), outputs});
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  require_plain("reduce_scatter", input);
  require_plain("reduce_scatter", output);
  require(output.scalar_type() == input.scalar_type() && input.numel() == output.numel() * size_, "reduce_scatter",
          fmt::format("the input has {} elements, wanted {} times {}", input.numel(), size_, output.numel()));
  std::vector<const void*> parts;
  for (int rank = 0; rank < size_; ++rank) {
    parts.push_back(static_cast<const std::byte*>(input.const_data_ptr()) + rank * output.nbytes());
  }
  return start(make_reduce_scatter(call_of(Op::kReduceScatter, output, options.reduceOp), output.mutable_data_ptr(),
                                   std::move(parts), output.numel()),
               {c10d::OpType::_REDUCE_SCATTER_BASE, options.timeout, {output, input}, {output}});
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  require(outputs.size() == inputs.size(), "reduce_scatter", "wanted as many outputs as inputs");
  return together([&] {
    for (size_t i = 0; i < inputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
  });
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  auto out = cut<SendBuffer>("the input", input, all_of(input), input_splits, size_);
  auto in = cut<ReceiveBuffer>("the output", output, into(output), output_splits, size_);
  require(output.scalar_type() == input.scalar_type(), "all_to_all", "output and input have different dtypes");
  CallDescriptor call = call_of(Op::kAllToAll, input);
  call.elements = 0;  // ranks may have different sizes: compare_sizes() of the exchange checks them
  return start(make_exchange(call, std::move(out), std::move(in), false),
               {c10d::OpType::ALLTOALL_BASE, options.timeout, {output, input}, {output}});
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const auto size = static_cast<size_t>(size_);
  require(outputs.size() == size && inputs.size() == size, "all_to_all",
          fmt::format("wanted {} inputs and outputs", size_));
  std::vector<SendBuffer> out;
  std::vector<ReceiveBuffer> in;
  Tensors used = outputs;
  for (int peer = 0; peer < size_; ++peer) {
    require_plain("all_to_all", inputs[peer]);
    require_plain("all_to_all", outputs[peer]);
    require(
        inputs[peer].scalar_type() == inputs[0].scalar_type() && outputs[peer].scalar_type() == inputs[0].scalar_type(),
        "all_to_all", "the tensors have different dtypes");
    out.push_back(all_of(inputs[peer]));
    in.push_back(into(outputs[peer]));
    used.push_back(inputs[peer]);
  }
  CallDescriptor call = call_of(Op::kAllToAll, inputs[0]);
  call.elements = 0;
  return start(make_exchange(call, std::move(out), std::move(in), false),
               {c10d::OpType::ALLTOALL, options.timeout, std::move(used), outputs});
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return start(
      make_exchange({.kind = Op::kBarrier}, std::vector<SendBuffer>(size_), std::vector<ReceiveBuffer>(size_), true),
      {c10d::OpType::BARRIER, options.timeout, {}, {}});
}

// The error of a barrier names all missing ranks anyway, so c10d's flag wait_all_ranks has no effect.
void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) { barrier(options)->wait(); }

// The ranks do not compare the signatures of a send and its recv; the receiver compares the sizes. A signature that
// announce() has stored for this message is dropped, so that the next collective does not use it as its own.
ShmBackend::WorkPtr ShmBackend::start_message(c10d::OpType type, Tensors& tensors, int peer, int tag) {
  const char* verb = type == c10d::OpType::SEND ? "send" : "recv";
  const at::Tensor& tensor = only(verb, tensors);
  require(peer >= -1 && peer < size_ && peer != rank_, verb,
          fmt::format("rank {} is not another rank of this group (this is rank {})", peer, rank_));
  require(tag >= 0, verb, fmt::format("tag {}: wanted 0 or more", tag));
  const auto work = c10::make_intrusive<MessageWork>(engine_, type, peer, tag, tensor, timeout_);
  announced_ = Signature();
  engine_->start(work);
  return keep(work);
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int destination, int tag) {
  require(destination >= 0, "send", fmt::format("no rank {}", destination));
  return start_message(c10d::OpType::SEND, tensors, destination, tag);
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int source, int tag) {
  require(source >= 0, "recv", fmt::format("no rank {}", source));
  return start_message(c10d::OpType::RECV, tensors, source, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return start_message(c10d::OpType::RECVANYSOURCE, tensors, -1, tag);
}

}  // namespace tessera::comm::shm
