// Whether a model folder is of a family of this version, before its config.json is read for good.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace tessera {

// The architecture (or model_type) that config.json in the folder names, where no family has it; none: ModelConfig
// reads the file. Error kFormat for text that is no config.json.
std::optional<std::string> unknown_architecture(const std::filesystem::path& dir);

}  // namespace tessera
