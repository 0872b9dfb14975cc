// Files beside the weights of a Hugging Face folder that go with them: tokenizer, chat templates (those in
// additional_chat_templates/ too), settings of generation, licences and notices. config.json is not among them: a model
// writes its own.
//
// No link is followed out of the source's folder (folder_links.h), so that an export holds files of the model alone.
#pragma once

#include <filesystem>

namespace tessera {

// Copies those that are there. A link that leads outside is left out, with a warning that names it. Error kIo.
void copy_companions(const std::filesystem::path& from, const std::filesystem::path& to);
// The same, and config.json. Error kFormat where config.json is a link that leads outside.
void copy_config_and_companions(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace tessera
