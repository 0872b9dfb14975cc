#include "tessera/parallel/context_parallel/apply_context_parallel.h"

#include "tessera/base/error.h"
#include "tessera/models/decoder/decoder.h"
#include "tessera/nn/attention/context_attention.h"
#include "tessera/nn/modules_of.h"
#include "tessera/parallel/modules/check_mesh.h"

namespace tessera {

void apply_context_parallel(nn::Module& model, const MeshPtr& mesh, const ApplyContextParallelOptions& options) {
  const auto rotate = nn::rotate_method_of(options.rotate_method);
  check_one_dim_mesh(mesh, "parallel.apply_context_parallel", "cp");
  const auto decoders = nn::modules_of<DecoderModel>(model);
  TESSERA_CHECK(!decoders.empty(), ErrorKind::kConfig,
                "[parallel.apply_context_parallel] the model has no DecoderModel, and only its attention can be made "
                "context parallel here. Pass a context sequence to nn::attention_pattern in the model's own forward.");
  if (mesh->size() == 1) return;
  const nn::ContextParallelGroup context_options{.group = mesh->group(0), .rotate = rotate};
  for (const auto& [path, decoder] : decoders) decoder->set_context_parallelism(context_options);
}

}  // namespace tessera
