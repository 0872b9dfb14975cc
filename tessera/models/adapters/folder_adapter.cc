#include "tessera/models/adapters/folder_adapter.h"

#include "tessera/base/error.h"

namespace tessera {

void refuse_folder_adapter(const std::filesystem::path& dir) {
  TESSERA_CHECK(
      !std::filesystem::exists(dir / "adapter_config.json") || !std::filesystem::exists(dir / "config.json"),
      ErrorKind::kConfig,
      "[models.load] {}: holds a model and, in adapter_config.json, an adapter of it. Merge them with "
      "'tessera ckpt convert {} OUT --to hf --adapter {}', or move adapter_config.json away to use the model alone.",
      dir.string(), dir.string(), dir.string());
}

}  // namespace tessera
