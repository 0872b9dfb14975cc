#include "tessera/train/nemo/accumulation.h"

#include "tessera/parallel/data_parallel/gradient_sync.h"
#include "tessera/parallel/fsdp/fully_shard.h"

namespace tessera::train {
namespace {

using Hook = void (AccumulationHooks::*)(bool pp_enabled);

// Sets the settings of fully_shard in each fully sharded model part (is_last_backward, reshard_after_backward,
// requires_gradient_sync) to `last`. If a part has hooks of its own (AccumulationHooks), `hook` is called instead,
// whether the part is sharded or not. It gets pp_enabled false, because with a pipeline the schedule prepares the parts
// and this function is not called.
void prepare_parts(const std::vector<nn::Module*>& parts, Hook hook, bool last) {
  for (auto* part : parts) {
    if (auto* own = dynamic_cast<AccumulationHooks*>(part)) {
      (own->*hook)(/*pp_enabled=*/false);
    } else if (is_fully_sharded(*part)) {
      set_is_last_backward(*part, last);
      set_reshard_after_backward(*part, last);
      set_requires_gradient_sync(*part, last);
    }
  }
}

}  // namespace

void MicrobatchFlags::set(bool optim_step, std::optional<bool> first_microbatch) {
  optim_step_ = optim_step;
  first_microbatch_ = first_microbatch;
  for (const auto& listener : listeners_) listener(*this);
}

void prepare_for_grad_accumulation(MicrobatchFlags& flags, const std::vector<nn::Module*>& model_parts,
                                   bool pp_enabled) {
  flags.set(false, true);
  if (!pp_enabled) prepare_parts(model_parts, &AccumulationHooks::prepare_for_grad_accumulation, false);
}

void prepare_after_first_microbatch(MicrobatchFlags& flags) { flags.set(flags.optim_step(), false); }

void prepare_for_final_backward(MicrobatchFlags& flags, const std::vector<nn::Module*>& model_parts, bool pp_enabled) {
  flags.set(true, flags.first_microbatch());
  if (!pp_enabled) prepare_parts(model_parts, &AccumulationHooks::prepare_for_final_backward, true);
}

}  // namespace tessera::train
