#include "tessera/text/tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace tessera::text {
namespace {

bool is_white_space(uint32_t c) {
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// Alphabetic characters outside the categories L, M and Nl. Other_Alphabetic has only marks, except for these circled
// and squared letters.
bool is_other_alphabetic(uint32_t c) {
  return (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
         (c >= 0x1F170 && c <= 0x1F189);
}

// Characters that came into category P after Unicode 8.0.
constexpr std::pair<uint32_t, uint32_t> kLaterPunctuation[] = {
    {0x61D, 0x61D},     {0x9FD, 0x9FD},     {0xA76, 0xA76},     {0xC77, 0xC77},     {0xC84, 0xC84},
    {0x1B4E, 0x1B4F},   {0x1B7D, 0x1B7F},   {0x2E43, 0x2E4F},   {0x2E52, 0x2E5D},   {0x10D6E, 0x10D6E},
    {0x10EAD, 0x10EAD}, {0x10F55, 0x10F59}, {0x10F86, 0x10F89}, {0x113D4, 0x113D5}, {0x113D7, 0x113D8},
    {0x1144B, 0x1144F}, {0x1145A, 0x1145B}, {0x1145D, 0x1145D}, {0x11660, 0x1166C}, {0x116B9, 0x116B9},
    {0x1183B, 0x1183B}, {0x11944, 0x11946}, {0x119E2, 0x119E2}, {0x11A3F, 0x11A46}, {0x11A9A, 0x11A9C},
    {0x11A9E, 0x11AA2}, {0x11B00, 0x11B09}, {0x11BE1, 0x11BE1}, {0x11C41, 0x11C45}, {0x11C70, 0x11C71},
    {0x11EF7, 0x11EF8}, {0x11F43, 0x11F4F}, {0x11FFF, 0x11FFF}, {0x12FF1, 0x12FF2}, {0x16D6D, 0x16D6F},
    {0x16E97, 0x16E9A}, {0x16FE2, 0x16FE2}, {0x1E5FF, 0x1E5FF}, {0x1E95E, 0x1E95F}};

bool is_punctuation(uint32_t code, utf8proc_category_t category) {
  if (code == 0x166D || code == 0x111C9) return true;  // punctuation in 8.0; now a symbol and a mark
  const auto last = code < 128 ? UTF8PROC_CATEGORY_SO : UTF8PROC_CATEGORY_PO;  // ASCII symbols are punctuation, too
  return category >= UTF8PROC_CATEGORY_PC && category <= last &&
         std::none_of(std::begin(kLaterPunctuation), std::end(kLaterPunctuation),
                      [&](const auto& range) { return code >= range.first && code <= range.second; });
}

uint8_t class_of(uint32_t code) {
  uint8_t result = is_white_space(code) ? kSpace : 0;
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(code));
  if (is_punctuation(code, category)) result |= kPunctuation;
  if (is_other_alphabetic(code) || code == 0x200C || code == 0x200D) result |= kWord;
  // utf8proc numbers the categories of letters, marks and numbers consecutively, so ranges select them.
  const auto within = [&](int first, int last) { return first <= category && category <= last; };
  if (within(UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LO)) result |= kLetter | kWord;
  if (within(UTF8PROC_CATEGORY_MN, UTF8PROC_CATEGORY_ME)) result |= kMark | kWord;
  if (within(UTF8PROC_CATEGORY_ND, UTF8PROC_CATEGORY_NO)) result |= kNumber;
  if (within(UTF8PROC_CATEGORY_ND, UTF8PROC_CATEGORY_NL) || category == UTF8PROC_CATEGORY_PC) result |= kWord;
  return result;
}

constexpr uint32_t kCodes = 0x110000;

// Sets kNfcUnsafe for characters that NFC changes, and for characters that can combine with the character before them:
// characters with a combining class, second parts of canonical compositions, and Hangul vowels and finals.
void mark_nfc_unsafe(std::vector<uint8_t>& classes) {
  for (uint32_t code = 0x80; code < kCodes; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    const auto* property = utf8proc_get_property(static_cast<utf8proc_int32_t>(code));
    if (property->combining_class != 0) classes[code] |= kNfcUnsafe;
    if (property->decomp_seqindex == UINT16_MAX || property->decomp_type != 0) continue;
    utf8proc_int32_t parts[32];
    int boundary = 0;
    const auto count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code), parts, 32,
                                static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), &boundary);
    for (utf8proc_ssize_t i = 1; i < count; ++i) classes[static_cast<size_t>(parts[i])] |= kNfcUnsafe;
    const auto composed =
        utf8proc_normalize_utf32(parts, count, static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    if (composed != 1 || parts[0] != static_cast<utf8proc_int32_t>(code)) classes[code] |= kNfcUnsafe;
  }
  for (uint32_t code = 0x1161; code <= 0x1175; ++code) classes[code] |= kNfcUnsafe;  // Hangul vowels
  for (uint32_t code = 0x11A7; code <= 0x11C2; ++code) classes[code] |= kNfcUnsafe;  // Hangul finals
}

// Builds a two-level table: most pages of 256 code points are equal and are stored once.
CharTable build_table() {
  CharTable table;
  std::vector<uint8_t> classes(kCodes, 0);
  // The loop skips planes 4 to 13, 15 and 16: class_of() returns 0 for all their code points.
  for (uint32_t code = 0; code < kCodes; ++code) {
    if (code == 0x40000) code = 0xE0000;
    if (code == 0xF0000) break;
    classes[code] = class_of(code);
  }
  mark_nfc_unsafe(classes);
  std::memcpy(table.ascii, classes.data(), 128);
  std::map<std::string_view, uint16_t> known;
  for (uint32_t page = 0; page < CharTable::kPages; ++page) {
    const std::string_view content(reinterpret_cast<const char*>(classes.data()) + (size_t{page} << 8), 256);
    const auto [found, added] = known.try_emplace(content, static_cast<uint16_t>(known.size()));
    if (added) table.pages.append(content);
    table.page_of[page] = found->second;
  }
  return table;
}

}  // namespace

const CharTable& char_table() {
  static const CharTable table = build_table();
  return table;
}

}  // namespace tessera::text
