#include "tessera/checkpoint/manifest.h"

#include <xxhash.h>

#include "tessera/base/error.h"
#include "tessera/base/json.h"
#include "tessera/base/mapped_file.h"
#include "tessera/base/quote.h"

namespace tessera {
namespace {

constexpr const char* kFormatName = "tessera.checkpoint";
constexpr int kVersion = 2;

constexpr JsonLimits kLimits{.max_bytes = size_t{1} << 30, .max_depth = 64, .max_keys = 20'000'000};

struct OtherVersion : Error {
  using Error::Error;
};

}  // namespace

std::string Manifest::dump() const {
  nlohmann::ordered_json out = {
      {"format", kFormatName}, {"version", kVersion}, {"step", step}, {"world_size", world_size}};
  out["number"] = number;
  out["validation_loss"] = validation_loss ? nlohmann::json(*validation_loss) : nlohmann::json();
  for (const auto& file : files) {
    out["files"].push_back(
        {{"name", file.name}, {"bytes", file.size_bytes}, {"xxh3", fmt::format("{:016x}", file.xxh3)}});
  }
  out["extra"] = extra;
  return out.dump(1);
}

Manifest Manifest::parse(const std::string& text, const std::filesystem::path& path) {
  try {
    const nlohmann::json json = parse_json(text, "manifest", kLimits);
    TESSERA_CHECK(json.at("format") == kFormatName, ErrorKind::kFormat, "format {}, wanted {}",
                  json.at("format").dump(), kFormatName);
    if (const int64_t version = json.at("version").get<int64_t>(); version != kVersion) {
      throw OtherVersion(ErrorKind::kFormat,
                         fmt::format("[checkpoint.load] {}: format version {}, this program reads version {}. Load it "
                                     "with the program that wrote it, and export the model.",
                                     path.string(), version, kVersion));
    }
    Manifest manifest;
    manifest.step = json.at("step").get<int64_t>();
    manifest.world_size = json.at("world_size").get<int64_t>();
    manifest.number = json.value("number", int64_t{0});
    if (!json.at("validation_loss").is_null()) manifest.validation_loss = json.at("validation_loss").get<double>();
    for (const auto& file : json.at("files")) {
      ManifestFile entry{file.at("name").get<std::string>(), file.at("bytes").get<uint64_t>(),
                         std::stoull(file.at("xxh3").get<std::string>(), nullptr, 16)};
      TESSERA_CHECK(!entry.name.empty() && entry.name.find('/') == std::string::npos && entry.name != "..",
                    ErrorKind::kFormat, "file name {} leaves the folder", quote(entry.name));
      manifest.files.push_back(std::move(entry));
    }
    manifest.extra = json.at("extra");
    return manifest;
  } catch (const OtherVersion&) {
    throw;
  } catch (const std::exception& error) {
    raise(ErrorKind::kFormat, "[checkpoint.load] {}: {}. The checkpoint is damaged; take an older one.", path.string(),
          escape(error.what(), 400));
  }
}

uint64_t hash_bytes(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

uint64_t hash_file(const std::filesystem::path& path) {
  const auto file = MappedFile::open(path);
  return XXH3_64bits(file->bytes().data(), file->bytes().size());
}

}  // namespace tessera
