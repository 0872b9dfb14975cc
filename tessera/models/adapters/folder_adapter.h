// An adapter that lies in the folder of a whole model.
#pragma once

#include <cstdint>
#include <filesystem>

namespace tessera {

// Of a folder that holds a whole model and adapter_config.json beside it, which transformers loads with the adapter.
enum class FolderAdapter : uint8_t { kRefuse, kIgnore };

// Error kConfig for such a folder: load_pretrained and conversions would give the model without its adapter.
void refuse_folder_adapter(const std::filesystem::path& dir);

}  // namespace tessera
