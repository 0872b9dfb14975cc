#include "tessera/models/decoder/causal_lm.h"

#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/models/config/family.h"

namespace tessera {

void check_no_image_tokens(const ModelConfig& config, const at::Tensor& tokens) {
  for (const int64_t id : config.image_token_ids) {
    TESSERA_CHECK(
        !tokens.eq(id).any().item<bool>(), ErrorKind::kConfig,
        "[models.forward] the tokens hold {}, which stands for an image: this version has only the text tower of "
        "{}. Give text without images.",
        id, config.architecture);
  }
}

at::Tensor CausalLM::logits(ModelInputs inputs) {
  inputs.labels.reset();
  inputs.targets.reset();
  return (*this)(std::move(inputs));
}

at::Tensor CausalLM::loss_sum(ModelInputs inputs, const at::Tensor& labels) {
  TESSERA_CHECK(labels.defined() && labels.sizes() == inputs.tokens.sizes(), ErrorKind::kShape,
                "[models.loss] labels have {} elements, tokens {}: wanted one label a token",
                labels.defined() ? labels.numel() : 0, inputs.tokens.numel());
  inputs.labels = labels;
  return (*this)(std::move(inputs));
}

at::Tensor CausalLM::logprobs(ModelInputs inputs, const at::Tensor& targets) {
  TESSERA_CHECK(targets.defined() && targets.sizes() == inputs.tokens.sizes(), ErrorKind::kShape,
                "[models.logprobs] targets have {} elements, tokens {}: wanted one target a token",
                targets.defined() ? targets.numel() : 0, inputs.tokens.numel());
  inputs.labels.reset();
  inputs.targets = targets;
  return (*this)(std::move(inputs));
}

std::shared_ptr<CausalLM> make_model(const ModelConfig& config, const nn::ParameterOptions& options) {
  return family_of(config.architecture).make(config, options);
}

}  // namespace tessera
