#include "tessera/data/encoding.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/utf8.h"

namespace tessera::data {
namespace {

constexpr size_t kLooked = size_t{1} << 20;  // bytes at the front that tell an encoding

// What has a zero byte in every second character is no text of letters.
bool is_full_of_zeros(std::string_view content) {
  const auto front = content.substr(0, kLooked);
  return static_cast<size_t>(std::count(front.begin(), front.end(), '\0')) * 10 >= front.size();
}

[[noreturn]] void refuse(const std::filesystem::path& path, const char* encoding, const char* name, size_t byte,
                         std::string_view content, uint64_t offset = 0) {
  raise(ErrorKind::kFormat,
        "[data.read] {}: byte {} is {:#04x}, which is no text in UTF-8: the "
        "file seems to be {}. Convert it with "
        "'iconv -f {} -t UTF-8'.",
        path.string(), offset + byte, static_cast<unsigned char>(content[byte]), encoding, name);
}

}  // namespace

void check_encoding(std::string_view content, const std::filesystem::path& path, uint64_t offset) {
  if (content.empty()) return;
  const size_t good = valid_utf8_prefix(content);
  if (offset == 0) {
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
