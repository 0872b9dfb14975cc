// Models by name: what a user calls a model to where it lies.
//
//   const std::filesystem::path model = resolve_model_path(recipe.model.path, "model.path");
//
// A path that is there is taken as it is; of a GGUF file, a folder in the user's cache (base/files/user_cache.h) with
// the config, the tokenizer and a link to the file is made once. Else NAME or ORG/NAME, with @REVISION where it is not
// main, is looked for in the Hub's cache on this machine: $HF_HUB_CACHE, else $HF_HOME/hub, else huggingface/hub in
// $XDG_CACHE_HOME or ~/.cache. The network is never asked. Thread-safe.
#pragma once

#include <string>

namespace tessera {

// models--ORG--NAME/snapshots/HASH of that cache for a name that is there; `name` itself for what is no model of the
// Hub, whose reader then says what is missing. A folder of the name wins, and the log says so. Error kConfig begins
// with `setting`: ORG/NAME that is not there, with the command that fetches it, and a snapshot without config.json.
// Errors of gguf_to_linked_folder().
std::string resolve_model_path(const std::string& name, const std::string& setting);

}  // namespace tessera
