// Copies the files that belong to a Hugging Face model besides its weights: tokenizer, chat templates (also those in
// additional_chat_templates/), generation settings, licences and notices. config.json is not among them, because the
// export of a model writes a new one.
//
// Symbolic links that lead out of the source folder are not followed (folder_links.h), so the copy holds only files of
// the model.
#pragma once

#include <filesystem>

namespace tessera {

// Copies the files listed at the top of this header (tokenizer, chat templates, licences, ...) from the folder `from`
// to the same relative paths in `to`. A file that `from` lacks is skipped. A symbolic link that leads out of `from` is
// skipped with a warning that names it. Error kIo when a file cannot be read or written.
void copy_companions(const std::filesystem::path& from, const std::filesystem::path& to);
// Copies the files that copy_companions() copies, and config.json. Error kFormat when config.json is a symbolic link
// that leads out of `from`.
void copy_config_and_companions(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace tessera
