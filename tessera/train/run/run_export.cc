#include "tessera/train/run/run_export.h"

#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/companions.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/config/end_tokens.h"
#include "tessera/models/files/weights.h"
#include "tessera/train/output/run_mark.h"
#include "tessera/train/run/model_source.h"

namespace tessera::train {

void export_run(const Recipe& recipe, const RunMesh& run_mesh, const RunData& data, CausalLM& model,
                RunFolder* folder) {
  const auto fresh = private_folder(recipe.checkpoint.dir) / "staging" / "model";
  if (run_mesh.is_rank_zero()) std::filesystem::remove_all(fresh);
  comm::barrier(run_mesh.world_group());
  // Saving a sharded model gathers its parameters, so all ranks must take part. Of a replicated model the first rank of
  // each pipeline stage holds all parameters of the stage and saves them alone.
  const bool first_of_stage = run_mesh.world().rank() == run_mesh.stage_ranks().front();
  comm::attempt_together(run_mesh.world_group(), [&] {
    if (first_of_stage || is_dtensor(model.parameters().front())) {
      if (recipe.lora.is_enabled() && !recipe.lora.merge) {
        const auto base = public_model_name(recipe);
        save_adapters(model, fresh, {.base = base.name, .revision = base.revision, .pipeline = run_mesh.pipeline()});
        if (run_mesh.is_rank_zero()) copy_companions(recipe.model.path, fresh);
      } else {
        save_pretrained(model, fresh, recipe.model.path,
                        {.dtype = parse_dtype_name(recipe.model.dtype),
                         .merge_adapters = recipe.lora.merge,
                         .pipeline = run_mesh.pipeline()});
      }
    }
    if (!run_mesh.is_rank_zero()) return;
    const auto ends = end_tokens(recipe.model.path, model.config(), *data.tokenizer, data.chat_template);
    write_end_tokens(fresh, ends, model.config());
    folder->publish_model(fresh);
  });
}

}  // namespace tessera::train
