#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/linear/lora.h"
#include "tessera/nn/linear/quantized_linear.h"
#include "tessera/parallel/tensor_parallel/detail/layouts.h"
#include "tessera/parallel/tensor_parallel/overlapped_products.h"
#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera {
namespace {

// The column-wise projections that read one input. The first projection that is called with an input computes the
// products of all projections, so the input is all-gathered once; the other projections then take their product from
// `ready`. Inputs are compared by identity. Each product is removed when it is taken, so a second call with the same
// input computes the products again.
struct SharedProducts {
  MeshPtr mesh;
  std::string path;
  int64_t chunks;
  std::vector<nn::Linear*> members;
  at::Tensor input;
  std::vector<at::Tensor> ready;

  at::Tensor take_product(size_t index, const at::Tensor& x) {
    if (!input.defined() || !input.is_same(x) || !ready[index].defined()) compute(x);
    at::Tensor result = std::exchange(ready[index], at::Tensor());
    const auto waits = [](const at::Tensor& tensor) { return tensor.defined(); };
    if (std::ranges::none_of(ready, waits)) input.reset();
    return result;
  }

 private:
  void compute(const at::Tensor& x) {
    TESSERA_CHECK(
        is_dtensor(x) && placements(x) == Placements{Shard(1)}, ErrorKind::kShape,
        "[parallel.style] {}: found {} as input, wanted a DTensor with placements (S(1)). Give the norm before it the "
        "style SequenceParallel.",
        path, is_dtensor(x) ? to_string(placements(x)) : "a plain tensor");
    std::vector<at::Tensor> weights, biases;
    for (const auto* member : members) {
      weights.push_back(to_local(member->weight));
      biases.push_back(member->bias.defined() ? to_local(member->bias) : at::Tensor());
    }
    ready = gathered_products(to_local(x), weights, biases,
                              {.along = {.mesh = mesh}, .tokens = x.size(1), .chunks = chunks});
    input = x;
  }
};

// A column-wise Linear whose product comes from SharedProducts.
struct GatheredLinear : nn::Linear {
  std::shared_ptr<SharedProducts> shared;
  size_t index;
  GatheredLinear(nn::Linear& former, std::shared_ptr<SharedProducts> products)
      : Linear(former, /*with_weight=*/true), shared(std::move(products)), index(shared->members.size()) {
    shared->members.push_back(this);
  }
  at::Tensor forward(const at::Tensor& x) override { return shared->take_product(index, x); }
};

// A row-wise Linear whose product is reduce-scattered over the sequence. The bias is added after the sum, once.
struct ScatteredLinear : nn::Linear {
  MeshPtr mesh;
  int64_t chunks;
  ScatteredLinear(nn::Linear& former, MeshPtr over, int64_t pieces)
      : Linear(former, /*with_weight=*/true), mesh(std::move(over)), chunks(pieces) {}
  at::Tensor forward(const at::Tensor& x) override {
    const auto part = scattered_product(is_dtensor(x) ? to_local(x) : x, to_local(weight),
                                        {.along = {.mesh = mesh}, .tokens = x.size(1), .chunks = chunks});
    const auto y = from_local(part.contiguous(), mesh, {Shard(1)},
                              FromLocalOptions::contiguous({x.size(0), x.size(1), part.size(2)}));
    return bias.defined() ? y + bias : y;
  }
};

nn::Linear& linear_child(nn::Module& module, const std::string& name, const std::string& path) {
  for (const auto& [child_name, child] : module.named_children()) {
    auto* linear = child_name == name ? dynamic_cast<nn::Linear*>(child.get()) : nullptr;
    if (linear == nullptr) continue;
    TESSERA_CHECK(
        dynamic_cast<nn::LoraLinear*>(linear) == nullptr && nn::packed_weight_of(*linear) == nullptr,
        ErrorKind::kConfig,
        "[parallel.style] {}.{}: found an adapter or a packed weight, which OverlappedBlock does not support. "
        "Set async_tensor_parallel to false.",
        path, name);
    return *linear;
  }
  raise(ErrorKind::kConfig, "[parallel.style] {}: found no Linear named {}, which its style OverlappedBlock needs.",
        path, name);
}

}  // namespace

std::string OverlappedBlock::describe() const {
  return fmt::format("OverlappedBlock({} -> {}, {} chunks)", fmt::join(options_.gathered, ", "), options_.scattered,
                     options_.chunks);
}

// All children are checked before the first one is replaced. A replacement takes over the slots of the former Linear
// and is marked as distributed, so no other style shards it again.
void OverlappedBlock::apply(nn::Module& module, const StyleContext& context) const {
  for (const auto& name : options_.gathered) linear_child(module, name, context.path);
  linear_child(module, options_.scattered, context.path);
  const auto shared = std::make_shared<SharedProducts>();
  shared->mesh = context.mesh;
  shared->path = context.path;
  shared->chunks = options_.chunks;
  const auto replace = [&](const std::string& name, const auto& make) {
    auto& former = linear_child(module, name, context.path);
    detail::mark_distributed_once(former, context.path + "." + name);
    const bool rows = name == options_.scattered;
    for (auto& slot : former.own_parameters()) {
      context.distribute(slot, !rows ? Shard(0) : slot.parameter.dim() == 2 ? Shard(1) : Replicate());
    }
    const std::shared_ptr<nn::Linear> made = make(former);
    detail::mark_distributed_once(*made, context.path + "." + name);
    module.replace_child(name, made);
    if (context.styled != nullptr) context.styled->insert(made.get());
  };
  for (const auto& name : options_.gathered) {
    replace(name, [&](nn::Linear& former) { return std::make_shared<GatheredLinear>(former, shared); });
  }
  replace(options_.scattered,
          [&](nn::Linear& former) { return std::make_shared<ScatteredLinear>(former, context.mesh, options_.chunks); });
}

}  // namespace tessera
