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

// Returns models--ORG--NAME/snapshots/HASH in that cache for a name that is there. Returns `name` itself when it cannot
// be a name of the Hub; the function that reads it then reports the error. An existing folder of the name has priority,
// with a line in the log. Errors kConfig, which begin with `setting`: ORG/NAME that is not in the cache (the message
// has the command that fetches it), and a snapshot without config.json. Errors of gguf_to_linked_folder().
std::string resolve_model_path(const std::string& name, const std::string& setting);

}  // namespace tessera
