// SipHash against the test vectors of its authors.
#include "tessera/base/text/siphash.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

// The vectors of the reference implementation: the key is bytes 0 to 15, message n is bytes 0 to n - 1.
TEST(SipHash, MatchesTheReferenceVectors) {
  const SipKey key = {0x0706050403020100, 0x0f0e0d0c0b0a0908};
  std::string message;
  EXPECT_EQ(siphash(key, message), 0x726fdb47dd0e0e31U);
  message.push_back(0);
  EXPECT_EQ(siphash(key, message), 0x74f839c593dc67fdU);
  for (char byte = 1; byte < 7; ++byte) message.push_back(byte);
  EXPECT_EQ(siphash(key, message), 0xab0200f58b01d137U);
  message.push_back(7);
  EXPECT_EQ(siphash(key, message), 0x93f5f5799a932462U);
  for (char byte = 8; byte < 15; ++byte) message.push_back(byte);
  EXPECT_EQ(siphash(key, message), 0xa129ca6149be45e5U);
}

}  // namespace
}  // namespace tessera
