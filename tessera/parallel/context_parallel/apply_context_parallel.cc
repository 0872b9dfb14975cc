#include "tessera/parallel/context_parallel/apply_context_parallel.h"

#include "tessera/base/error.h"
#include "tessera/models/decoder/decoder.h"
#include "tessera/parallel/context_parallel/detail/mesh_group.h"

namespace tessera {

void apply_context_parallel(nn::Module& model, const MeshPtr& mesh, const ApplyContextParallelOptions& options) {
  const auto rotate = nn::rotate_method_of(options.rotate_method);
  detail::check_context_mesh("apply_context_parallel", mesh);
  std::vector<DecoderModel*> decoders;
  for (const auto& [path, module] : model.named_modules()) {
    if (auto* decoder = dynamic_cast<DecoderModel*>(module)) decoders.push_back(decoder);
  }
  TESSERA_CHECK(!decoders.empty(), ErrorKind::kConfig,
                "[parallel.apply_context_parallel] the model has no DecoderModel, whose attention it could tell. Give "
                "nn::attention_pattern a context sequence in the model's own forward instead.");
  if (mesh->size() == 1) return;
  for (auto* decoder : decoders) decoder->set_context_parallelism(detail::context_over(mesh, rotate));
}

}  // namespace tessera
