// A tiny model over the ranks of a pipeline, its micro-batches, and the results of one rank for comparison.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <map>
#include <string>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/optim/grad_norm.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/parallel/pipeline/pipeline.h"
#include "tests/models/tiny.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {

// Micro-batches with two documents per row, padding behind them and some masked labels. The second micro-batch has no
// labels; the last one has fewer rows.
inline std::vector<ModelInputs> documents(int count, int64_t length = 12) {
  std::vector<ModelInputs> out;
  for (int i = 0; i < count; ++i) {
    const int64_t rows = i + 1 == count && count > 1 ? 1 : 2, first = 4 + i % 3;
    ModelInputs batch;
    batch.tokens = tiny_tokens(rows, length).add(5 * i).remainder_(37);
    batch.positions = at::cat({at::arange(first), at::arange(length - first)}).expand({rows, length}).contiguous();
    batch.document_ids = at::cat({at::zeros({first}, at::kLong), at::ones({length - first}, at::kLong)})
                             .expand({rows, length})
                             .contiguous();
    batch.document_ids.narrow(1, length - 1, 1).fill_(-1);
    batch.labels = next_labels(batch.tokens);
    batch.labels.narrow(1, first - 1, 1).fill_(-100);
    batch.labels.narrow(1, length - 2, 2).fill_(-100);
    if (i % 2 == 0) batch.labels.narrow(1, 1, 2).fill_(-100);
    if (i == 1) batch.labels.fill_(-100);
    batch.visit_tensors([](at::Tensor& each) { each = here(each); });
    out.push_back(batch);
  }
  return out;
}

// Copies of the batches on the calling rank's device.
inline std::vector<ModelInputs> here(std::vector<ModelInputs> batches) {
  for (auto& batch : batches) batch.visit_tensors([](at::Tensor& each) { each = here(each); });
  return batches;
}

inline double labels_in(const std::vector<ModelInputs>& batches) {
  int64_t labels = 0;
  for (const auto& batch : batches) labels += batch.labels.ne(-100).sum().item<int64_t>();
  return static_cast<double>(labels);
}

struct Trained {
  double loss = 0, norm = 0;
  std::map<std::string, at::Tensor> gradients;
};

// Result of training on one rank with plain accumulation.
inline Trained trained_whole(const std::string& changes, const std::vector<ModelInputs>& batches) {
  at::set_num_threads(1);  // the same thread count as the ranks have
  auto model = tiny_model(changes);
  Trained out;
  const double divisor = labels_in(batches);
  for (const auto& batch : batches) {
    const auto loss = model->loss_sum(batch, batch.labels) / divisor;
    loss.backward();
    out.loss += loss.item<double>();
  }
  out.norm = optim::get_grad_norm(model->parameters());
  for (const auto& named : model->named_parameters()) out.gradients[named.name] = named.slot->parameter.grad();
  return out;
}

inline std::string layers(int count, const std::string& more = "") {
  return "\"num_hidden_layers\": " + std::to_string(count) + (more.empty() ? "" : ", ") + more;
}

struct PipelineRig {
  std::shared_ptr<CausalLM> model;
  std::unique_ptr<pipeline::Pipeline> pipeline;

  // `parallel.mesh` is set if the run has other mesh dims than the pipeline's.
  PipelineRig(const std::string& changes, const pipeline::PipelineOptions& options,
              ParallelizeModelOptions parallel = {}) {
    const auto config = ModelConfig::parse(tiny_config(changes), "tiny");
    model = make_model(config, {.device = at::kMeta});
    pipeline::keep_stages(*model, options);
    if (parallel.mesh) parallelize_model(*model, parallel);
    init_weights(*model, 5, test_device());
    if (parallel.mesh) set_gradient_divide_factor(*model, 1);
    pipeline = std::make_unique<pipeline::Pipeline>(*model, options);
  }
  double norm() {
    return pipeline->norm_over_stages(optim::grad_norm_tensor(pipeline->norm_parameters())).item<double>();
  }

  // Loss and norm are compared within 1e-5, gradients within 1e-4 of their largest element. `loss` is the loss of all
  // ranks that count.
  void expect_like(const Trained& wanted, double loss, const std::string& what) {
    EXPECT_NEAR(loss, wanted.loss, 1e-5 * std::abs(wanted.loss)) << what;
    EXPECT_NEAR(norm(), wanted.norm, 1e-5 * wanted.norm) << what;
    for (const auto& named : model->named_parameters()) {
      const auto& gradient = wanted.gradients.at(named.name);
      ASSERT_TRUE(named.slot->parameter.grad().defined()) << what << " " << named.name;
      const auto found = whole(named.slot->parameter.grad()).cpu();
      ASSERT_EQ(found.sizes(), gradient.sizes()) << what << " " << named.name;
      const double most = gradient.abs().max().item<double>(), off = (found - gradient).abs().max().item<double>();
      EXPECT_LE(off, 1e-4 * most) << what << " " << named.name;
    }
  }
};

inline MeshPtr stages_mesh(const WorldPtr& world) {
  return init_device_mesh(world, test_device_type(), {world->size()}, {"pp"});
}

// The sum over all ranks.
inline double sum_of_ranks(const WorldPtr& world, double own) {
  const auto sum = at::full({1}, own, at::kDouble);
  comm::all_reduce(*world->group(), sum).wait();
  return sum.item<double>();
}

}  // namespace tessera::testing
