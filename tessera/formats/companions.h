// Copies the files that belong to a Hugging Face model besides its weights: tokenizer, chat templates (also those in
// additional_chat_templates/), generation settings, licences and notices. config.json is not copied: a model writes its
// own.
//
// No link is followed out of the source folder (folder_links.h), so an export holds only files of the model.
#pragma once

#include <filesystem>

namespace tessera {

// Copies the files that exist. A link out of `from` is skipped with a warning that names it. Error kIo.
void copy_companions(const std::filesystem::path& from, const std::filesystem::path& to);
// Copies config.json, too. Error kFormat when config.json is a link out of `from`.
void copy_config_and_companions(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace tessera
