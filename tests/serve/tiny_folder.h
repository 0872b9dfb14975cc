// A folder with a tiny model, a tokenizer and a chat template.
#pragma once

#include "tessera/base/files/file.h"
#include "tessera/models/files/weights.h"
#include "tests/cli/tiny_tokenizer.h"
#include "tests/models/tiny.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {

class TinyFolder {
 public:
  TinyFolder() {
    const auto model = tiny_model(R"("max_position_embeddings": 4096)");
    save_pretrained(*model, path(), {});
    publish_file(path() / "tokenizer.json", character_tokenizer("abcdefghijklmnopqrstuvwxyz .{}[]\":,1_"));
    publish_file(path() / "chat_template.jinja",
                 "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}{% if tools %}tools. {% endif %}");
  }
  std::filesystem::path path() const { return folder_ / "tiny"; }

 private:
  TempFolder folder_;
};

}  // namespace tessera::testing
