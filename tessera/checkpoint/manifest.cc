#include "tessera/checkpoint/manifest.h"

#include <xxhash.h>

#include <charconv>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/files/mapped_file.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"

namespace tessera {
namespace {

constexpr const char* kFormatName = "tessera.checkpoint";
constexpr int kVersion = 2;

constexpr JsonLimits kLimits{.max_bytes = size_t{1} << 30, .max_depth = 64, .max_keys = 20'000'000};
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

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

namespace {

uint64_t hash_of(const std::string& digits) {
  uint64_t hash = 0;
  const auto end = digits.data() + digits.size();
  const auto read = std::from_chars(digits.data(), end, hash, 16);
  TESSERA_CHECK(digits.size() <= 16 && read.ec == std::errc() && read.ptr == end, ErrorKind::kFormat,
                "hash {}, wanted up to 16 hexadecimal digits", quote(digits));
  return hash;
}

Manifest manifest_of(const JsonReader& top) {
  Manifest manifest;
  manifest.step = top.integer("step", std::nullopt, 0, kMost);
  manifest.world_size = top.integer("world_size", std::nullopt, 1, kMost);
  manifest.number = top.integer("number", 0, 0, kMost);
  constexpr double kLargest = std::numeric_limits<double>::max();
  if (top.has("validation_loss")) {
    manifest.validation_loss = top.number("validation_loss", std::nullopt, -kLargest, kLargest);
  }
  for (const auto& file : top.at("files").items()) {
    ManifestFile entry{file.string("name"), file.at("bytes").as_unsigned(), hash_of(file.string("xxh3"))};
    TESSERA_CHECK(!entry.name.empty() && entry.name.find('/') == std::string::npos && entry.name != "..",
                  ErrorKind::kFormat, "file name {} leaves the folder", quote(entry.name));
    manifest.files.push_back(std::move(entry));
  }
  manifest.extra = top.at("extra").value();
  return manifest;
}

}  // namespace

// The version is compared before the other keys are read. A manifest of another version may have other keys, so the
// error names the version and does not say that the checkpoint is damaged.
Manifest Manifest::parse(const std::string& text, const std::filesystem::path& path) {
  int64_t version = kVersion;
  try {
    const Json json = parse_json_object(text, "manifest", kLimits);
    const JsonReader top(json, "manifest");
    const auto format = top.string("format");
    TESSERA_CHECK(format == kFormatName, ErrorKind::kFormat, "format {}, wanted {}", quote(format), kFormatName);
    version = top.integer("version", std::nullopt, 0, kMost);
    if (version == kVersion) return manifest_of(top);
  } catch (const std::exception& error) {
    raise(ErrorKind::kFormat, "[checkpoint.load] {}: {}. The checkpoint is damaged; take an older one.", path.string(),
          escape(error.what(), 400));
  }
  raise(ErrorKind::kFormat,
        "[checkpoint.load] {}: format version {}, this program reads version {}. Load it with the program that wrote "
        "it, and export the model.",
        path.string(), version, kVersion);
}

uint64_t hash_bytes(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

uint64_t hash_file(const std::filesystem::path& path) {
  const auto file = MappedFile::open(path);
  return XXH3_64bits(file->bytes().data(), file->bytes().size());
}

}  // namespace tessera
