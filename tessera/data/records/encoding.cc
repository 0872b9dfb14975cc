#include "tessera/data/records/encoding.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/utf8.h"

namespace tessera::data {
namespace {

constexpr size_t kExaminedBytes = size_t{1} << 20;  // bytes at the front that are examined

// Whether at least a tenth of the bytes are zeros. Text has no zeros; UTF-16 has a zero in almost every character.
bool is_full_of_zeros(std::string_view content) {
  const auto front = content.substr(0, kExaminedBytes);
  return static_cast<size_t>(std::ranges::count(front, '\0')) * 10 >= front.size();
}

[[noreturn]] void refuse(const std::filesystem::path& path, const char* encoding, const char* name, size_t byte,
                         std::string_view content, uint64_t offset = 0) {
  raise(ErrorKind::kFormat,
        "[data.read] {}: byte {} is {:#04x}, which is not UTF-8 text: the "
        "file seems to be {}. Convert it with "
        "'iconv -f {} -t UTF-8'.",
        path.string(), offset + byte, static_cast<unsigned char>(content[byte]), encoding, name);
}

// Checks the beginning of a file (`content`). If it is the beginning of a well-known kind of file that is not text,
// such as a zip archive, and is not UTF-8, throws Error kFormat; the message says how to convert the file.
void refuse_other_kinds(std::string_view content, const std::filesystem::path& path) {
  struct FileSignature {
    std::string_view mark;
    const char* name;
    const char* advice;
  };
  static const FileSignature kSignatures[] = {
      {{"\x28\xb5\x2f\xfd", 4}, "compressed with zstd", "Unpack it with 'zstd -d'"},
      {"BZh", "compressed with bzip2", "Unpack it with 'bunzip2'"},
      {{"\xfd"
        "7zXZ\0",
        6},
       "compressed with xz",
       "Unpack it with 'unxz'"},
      {{"PK\x03\x04", 4}, "a zip archive", "Unpack it with 'unzip'"},
      {"ARROW1", "an Arrow file", "Write it as Parquet or JSON lines"},
      {"PAR1", "a Parquet file", "Name it .parquet"},
      {{"\x1f\x8b", 2}, "compressed with gzip a second time", "Unpack it with 'gunzip'"}};
  constexpr size_t kCharacter = 4;  // the last character may be cut off
  const auto front = content.substr(0, kExaminedBytes);
  for (const auto& signature : kSignatures) {
    if (!content.starts_with(signature.mark) || valid_utf8_prefix(front) + kCharacter > front.size()) continue;
    raise(ErrorKind::kFormat, "[data.read] {}: is not text: it seems to be {}. {}.", path.string(), signature.name,
          signature.advice);
  }
}

}  // namespace

// Checks the most specific cases first: other file types, byte order marks, zero bytes. Any other invalid UTF-8 is
// called Latin-1, the most likely encoding of such a file.
void check_encoding(std::string_view content, const std::filesystem::path& path, uint64_t offset) {
  if (content.empty()) return;
  const size_t good = valid_utf8_prefix(content);
  if (offset == 0) {
    refuse_other_kinds(content, path);
    const size_t zero = content.find('\0');
    const size_t byte = std::min(good, zero);
    const auto starts = [&](std::string_view mark) { return content.starts_with(mark); };
    if (starts({"\xff\xfe\0\0", 4}) || starts({"\0\0\xfe\xff", 4})) refuse(path, "UTF-32", "UTF-32", byte, content);
    if (starts("\xff\xfe") || starts("\xfe\xff")) refuse(path, "UTF-16", "UTF-16", byte, content);
    if (zero != content.npos && is_full_of_zeros(content)) {
      refuse(path, "UTF-16 or UTF-32 without a byte order mark", zero % 2 == 0 ? "UTF-16BE" : "UTF-16LE", zero,
             content);
    }
  }
  if (good == content.size()) return;
  const bool at_end = good + invalid_utf8_length(content.substr(good)) == content.size();
  refuse(path, at_end ? "cut off inside a character, or Latin-1" : "Latin-1 or Windows-1252", "WINDOWS-1252", good,
         content, offset);
}

}  // namespace tessera::data
