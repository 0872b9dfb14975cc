// Constants of the zip format, used by ZipArchive and ZipWriter. All fields are little-endian.
#pragma once

#include <cstdint>

namespace tessera::detail {

constexpr uint32_t kZipLocalHeader = 0x04034b50;
constexpr uint32_t kZipDescriptor = 0x08074b50;
constexpr uint32_t kZipCentralHeader = 0x02014b50;
constexpr uint32_t kZip64End = 0x06064b50;
constexpr uint32_t kZip64Locator = 0x07064b50;
constexpr uint32_t kZipEnd = 0x06054b50;

constexpr uint64_t kZipLocalHeaderBytes = 30;
constexpr uint64_t kZipCentralHeaderBytes = 46;
constexpr uint64_t kZip64EndBytes = 56;
constexpr uint64_t kZip64LocatorBytes = 20;
constexpr uint64_t kZipEndBytes = 22;

constexpr uint16_t kZipEncrypted = 1 << 0;
constexpr uint16_t kZipHasDescriptor = 1 << 3;  // checksum and sizes follow the data
constexpr uint16_t kZipUtf8 = 1 << 11;

constexpr uint16_t kZip64Extra = 1;
constexpr uint16_t kPaddingExtra = 0x4246;  // "FB"

constexpr uint64_t kZip32Max = 0xFFFFFFFF;  // means that the value is in the ZIP64 field
constexpr uint64_t kZip16Max = 0xFFFF;

constexpr uint64_t kZipAlignment = 64;  // alignment of each entry's data, counted from the start of the archive

}  // namespace tessera::detail
