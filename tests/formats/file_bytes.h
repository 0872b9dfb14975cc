// Builds files byte by byte, for tests of invalid files that a parser must refuse.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"

namespace tessera::testing {

inline void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

template <class T>
std::string raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// The message of the Error that `action` throws. The error must be of this kind, and the message must be one line.
inline std::string error_of(ErrorKind kind, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.kind()), std::string(to_string(kind))) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not an Error: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

// Calls `open` with every proper prefix of the file, which must be refused, then with `flips` copies in which one to
// three bytes are changed. Each copy must be read or refused with an Error of kind format. Any other result fails the
// test.
inline void expect_survives_damage(const std::filesystem::path& good, const std::filesystem::path& scratch, int flips,
                                   const std::function<void(const std::filesystem::path&)>& open) {
  const auto bytes = read_file(good);
  for (size_t size = 0; size < bytes.size(); ++size) {
    SCOPED_TRACE("cut to " + std::to_string(size) + " bytes");
    write_bytes(scratch, bytes.substr(0, size));
    error_of(ErrorKind::kFormat, [&] { open(scratch); });
    if (::testing::Test::HasFailure()) return;
  }
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int flip = 0; flip < flips; ++flip) {
    auto damaged = bytes;
    for (uint32_t i = 0; i < 1 + random() % 3; ++i) damaged[random() % damaged.size()] = static_cast<char>(random());
    write_bytes(scratch, damaged);
    try {
      open(scratch);
    } catch (const Error& error) {
      ASSERT_EQ(error.exit_code(), 3) << error.what();
    } catch (const std::exception& error) {
      FAIL() << "flip " << flip << ": not an Error: " << error.what();
    }
  }
}

}  // namespace tessera::testing
