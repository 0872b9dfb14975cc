// Finds the folder of a model that the user gives as a path, a file or a name.
//
//   const std::filesystem::path model = resolve_model_path(recipe.model.path, "model.path");
//
// An existing path is used as it is. For a GGUF file, a folder with the config, the tokenizer and a link to the file is
// made once in the user's cache (base/files/user_cache.h). Any other text is NAME or ORG/NAME, optionally with
// @REVISION (default main), and is looked up in the Hub's cache on this machine: $HF_HUB_CACHE, else $HF_HOME/hub, else
// huggingface/hub in $XDG_CACHE_HOME or ~/.cache. The network is never used. Thread-safe.
#pragma once

#include <string>

namespace tessera {

// Returns `name` if this path exists, but for a GGUF file the folder that was made for it. For a name in the Hub's
// cache it returns models--ORG--NAME/snapshots/HASH in the cache. An existing path has priority over the Hub's cache,
// which is logged. For text that is not a valid Hub name it returns `name`; the function that reads the model then
// reports the error. Error kConfig with `setting` in the message: a Hub name that is not in the cache (the message has
// the command that fetches the model), and a snapshot without config.json. For a GGUF file also the errors of
// gguf_to_linked_folder().
std::string resolve_model_path(const std::string& name, const std::string& setting);

}  // namespace tessera
