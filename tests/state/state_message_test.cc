#include "tessera/state/state_message.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/state/drawn_values.h"
#include "tests/state/values.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

TEST(StateMessage, CarriesAnyValue) {
  EXPECT_TRUE(rc::check([] {
    const auto value = drawn_value(3);
    RC_ASSERT(same_values(decode_state(encode_state(value)), value));
  }));
}

TEST(StateMessage, AnnouncesTensorsWithDimsAndSendsOthersByValue) {
  const auto message = encode_state(StateDict{{"w", drawn({3, 1}, 4).to(at::kBFloat16)}, {"step", at::full({}, 7.0)}},
                                    TensorsInMessage::kShapes);
  const auto read = decode_state(message).dict();
  EXPECT_TRUE(read.at("w").tensor().is_meta());
  EXPECT_EQ(read.at("w").tensor().scalar_type(), at::kBFloat16);
  EXPECT_EQ(read.at("w").tensor().sizes(), at::IntArrayRef({3, 1}));
  EXPECT_EQ(read.at("step").tensor().item<double>(), 7);
}

// Cut anywhere or with one byte changed, a message gives an Error or a value, and never much memory.
TEST(StateMessage, ReadsNothingBeyondWhatIsThere) {
  const auto bytes = encode_state(StateDict{
      {"a", StateList{1, drawn({2, 2}, 1), StateTuple{{"text", 2.5}}}}, {int64_t{5}, StateBytes{"xyz"}}, {"b", true}});
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(decode_state(std::string_view(bytes).substr(0, size)), Error) << size;
  }
  EXPECT_THROW(decode_state(bytes + "x"), Error);
  int refused = 0;
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (const int change : {1, 0x7f, 0x80, 0xff}) {
      auto broken = bytes;
      broken[at] = static_cast<char>(broken[at] ^ change);
      try {
        decode_state(broken);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kFormat);
        EXPECT_THAT(error.what(), HasSubstr("byte"));
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 100);
}

TEST(StateMessage, RefusesWhatItCannotCarry) {
  EXPECT_THAT(thrown_by([] { encode_state(at::Tensor()); }), HasSubstr("an undefined tensor"));
  EXPECT_THAT(thrown_by([] { encode_state(at::ones({2}, at::kMeta)); }), HasSubstr("meta device"));
  EXPECT_THAT(thrown_by([] { encode_state(std::shared_ptr<ShardedTensor>()); }), HasSubstr("ShardedTensor"));
  StateValue deep = 1;
  for (int i = 0; i < 70; ++i) deep = StateList{deep};
  EXPECT_THAT(thrown_by([&] { encode_state(deep); }), HasSubstr("64 deep"));
  std::string message;
  for (int i = 0; i < 200000; ++i) message += std::string("\x09\x01\0\0\0\0\0\0\0", 9);
  EXPECT_THAT(thrown_by([&] { decode_state(message); }), HasSubstr("too deep"));
}

}  // namespace
}  // namespace tessera::testing
