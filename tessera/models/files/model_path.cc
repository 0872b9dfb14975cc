#include "tessera/models/files/model_path.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/user_cache.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/version.h"
#include "tessera/models/gguf/gguf_convert.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// A model of the Hub: repository and revision.
struct HubId {
  std::string repository;  // NAME or ORG/NAME
  std::string revision = "main";
};

// Whether `part` is a valid name on the Hub: letters, digits, '.', '_' and '-', without '.' or '-' as first or last
// character. No valid name leads out of the cache folder, as ".." would.
bool is_hub_name(std::string_view part) {
  const auto inner = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '.' || c == '-'; };
  const auto outer = [](unsigned char c) { return std::isalnum(c) || c == '_'; };
  return !part.empty() && part.size() <= 96 && std::ranges::all_of(part, inner) && outer(part.front()) &&
         outer(part.back()) && part.find("..") == part.npos && part.find("--") == part.npos;
}

std::optional<HubId> parse_hub_id(const std::string& name) {
  HubId id{.repository = name};
  if (const size_t at = name.find('@'); at != name.npos) {
    id.repository = name.substr(0, at);
    id.revision = name.substr(at + 1);
  }
  const size_t slash = id.repository.find('/');
  const bool good = slash != id.repository.npos
                        ? is_hub_name(id.repository.substr(0, slash)) && is_hub_name(id.repository.substr(slash + 1))
                        : is_hub_name(id.repository);
  if (!good || !is_hub_name(id.revision)) return std::nullopt;
  return id;
}

fs::path hub_cache() {
  const auto set = [](const char* variable) -> fs::path {
    const char* value = std::getenv(variable);
    return value ? value : "";
  };
  for (const char* whole : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    if (const auto path = set(whole); !path.empty()) return path;
  }
  if (const auto home = set("HF_HOME"); !home.empty()) return home / "hub";
  if (const auto cache = set("XDG_CACHE_HOME"); !cache.empty()) return cache / "huggingface" / "hub";
  return set("HOME") / ".cache" / "huggingface" / "hub";
}

// Returns the snapshot folder of a revision: a branch, a tag or a commit. The file refs/REVISION has the commit of a
// branch or tag. Returns an empty path when the cache does not have the snapshot.
fs::path snapshot_of(const fs::path& model, const std::string& revision) {
  std::error_code ignored;
  std::string commit = revision;
  if (const auto ref = model / "refs" / revision; fs::is_regular_file(ref, ignored)) {
    commit = read_file(ref, 4096);
    while (!commit.empty() && std::isspace(static_cast<unsigned char>(commit.back()))) commit.pop_back();
  }
  const auto snapshot = model / "snapshots" / commit;
  return is_hub_name(commit) && fs::is_directory(snapshot, ignored) ? snapshot : fs::path();
}

std::string find_model(const std::string& name, const std::string& setting) {
  const auto id = parse_hub_id(name);
  if (!id) return name;
  const auto cache = hub_cache();
  std::string folder = "models--" + id->repository;
  if (const size_t slash = folder.find('/'); slash != folder.npos) folder.replace(slash, 1, "--");
  const auto snapshot = snapshot_of(cache / folder, id->revision);
  std::error_code ignored;
  if (fs::exists(name, ignored)) {
    if (!snapshot.empty()) {
      log_info("[models.find] {}: using the folder {}, not the Hub's model of that name", setting, name);
    }
    return name;
  }
  const std::string command = id->revision == "main" ? "hf download " + id->repository
                                                     : "hf download " + id->repository + " --revision " + id->revision;
  if (snapshot.empty()) {
    raise(ErrorKind::kConfig,
          "[models.find] {}: {}: no such folder or file here, and no such model in the Hub's cache {}. "
          "Fetch it with '{}'.",
          setting, quote(name), cache.string(), command);
  }
  TESSERA_CHECK(fs::exists(snapshot / "config.json", ignored), ErrorKind::kConfig,
                "[models.find] {}: {}: {} holds no config.json, so the download is incomplete. Fetch it with '{}'.",
                setting, quote(name), snapshot.string(), command);
  log_info("[models.find] {}: {} is {}", setting, name, snapshot.string());
  return snapshot.string();
}

// Returns the cache folder for a GGUF file and makes it if it does not exist. Its name has a hash of the file's path,
// size and modification time, so a changed file gets a new folder. When several processes make the folder at the same
// time, the first one succeeds and the others use its folder.
std::string linked_folder(const fs::path& gguf) {
  const auto cache = user_cache();
  TESSERA_CHECK(!cache.empty(), ErrorKind::kIo,
                "[models.find] {}: neither XDG_CACHE_HOME nor HOME names a folder, in which its config and "
                "tokenizer are cached. Convert it with 'tessera ckpt convert FILE DIR' and use the folder.",
                gguf.string());
  const auto file = fs::canonical(gguf);
  constexpr int kForm = 2;  // version of the form of the files in the folder; a change makes a new folder
  const auto state = fmt::format("{} {} {} {}", kForm, file.string(), fs::file_size(file),
                                 fs::last_write_time(file).time_since_epoch().count());
  const auto folder = cache / "models" / version() /
                      fmt::format("{}-{:016x}", file.stem().string(), XXH3_64bits(state.data(), state.size()));
  if (!fs::exists(folder)) {
    fs::create_directories(folder.parent_path());
    try {
      gguf_to_linked_folder(file, folder);
    } catch (const Error&) {
      if (!fs::exists(folder)) throw;  // another process was faster
    }
  }
  log_info("[models.find] {}: config and tokenizer are in {}", gguf.string(), folder.string());
  return folder.string();
}

}  // namespace

std::string resolve_model_path(const std::string& name, const std::string& setting) {
  auto found = find_model(name, setting);
  std::error_code ignored;
  const bool is_gguf = fs::path(found).extension() == ".gguf" && fs::is_regular_file(found, ignored);
  return is_gguf ? linked_folder(found) : found;
}

}  // namespace tessera
