// Tests the bytes in which ranks exchange values of state dicts: round trips, refused values, and hostile input.
#include "tessera/state/state_message.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/formats/torch/pickler.h"
#include "tests/state/drawn_values.h"
#include "tests/state/values.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

TEST(StateMessage, RoundTripsAnyValue) {
  EXPECT_TRUE(rc::check([] {
    const auto value = drawn_value(3);
    RC_ASSERT(same_values(decode_state(encode_state(value)), value));
  }));
}

TEST(StateMessage, SendsOnlyShapesOfTensorsWithDims) {
  const auto message = encode_state(StateDict{{"w", drawn({3, 1}, 4).to(at::kBFloat16)}, {"step", at::full({}, 7.0)}},
                                    TensorsInMessage::kShapes);
  const auto read = decode_state(message).dict();
  EXPECT_TRUE(read.at("w").tensor().is_meta());
  EXPECT_EQ(read.at("w").tensor().scalar_type(), at::kBFloat16);
  EXPECT_EQ(read.at("w").tensor().sizes(), at::IntArrayRef({3, 1}));
  EXPECT_EQ(read.at("step").tensor().item<double>(), 7);
}

// A message that is truncated anywhere, or has one byte changed, gives an Error or a value, and never allocates much
// memory.
TEST(StateMessage, RefusesTruncatedAndCorruptMessages) {
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
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 100);
}

TEST(StateMessage, RefusesUnsupportedValues) {
  EXPECT_THAT(thrown_by([] { encode_state(at::Tensor()); }), HasSubstr("an undefined tensor"));
  EXPECT_THAT(thrown_by([] { encode_state(at::ones({2}, at::kMeta)); }), HasSubstr("meta device"));
  EXPECT_THAT(thrown_by([] { encode_state(std::shared_ptr<ShardedTensor>()); }), HasSubstr("ShardedTensor"));
  StateValue deep = 1;
  for (int i = 0; i < 70; ++i) deep = StateList{deep};
  for (int i = 0; i < 30; ++i) deep = StateList{deep};
  EXPECT_THAT(thrown_by([&] { encode_state(deep); }), HasSubstr("nested more than 90 deep"));
  EXPECT_THAT(thrown_by([] { encode_state("\xff"); }), HasSubstr("UTF-8"));
  const std::string deeper = "\x80\x04" + std::string(200'000, '(') + std::string(200'000, 't') + ".";
  EXPECT_THAT(thrown_by([&] { decode_state(deeper); }), HasSubstr("deep"));
}

TEST(StateMessage, RefusesInvalidTensors) {
  const auto read = [](const PickleValue& id) {
    return thrown_by([&] { decode_state(pickle(PickleValue::persistent(id), {.protocol = 4})); });
  };
  const auto tuple = [](PickleValue::Items items) { return PickleValue::tuple(std::move(items)); };
  const auto shape = [&](PickleValue::Items sizes, PickleValue bytes) {
    return tuple({static_cast<int64_t>(at::kFloat), tuple(std::move(sizes)), std::move(bytes)});
  };
  EXPECT_THAT(read(shape({2}, PickleValue::bytes("1234567"))), HasSubstr("another number of bytes"));
  EXPECT_THAT(read(shape({-2}, {})), HasSubstr("a negative size"));
  EXPECT_THAT(read(shape({int64_t{1} << 40, int64_t{1} << 40}, {})), HasSubstr("more elements"));
  EXPECT_THAT(read(tuple({1000, tuple({}), {}})), HasSubstr("an unknown dtype"));
  EXPECT_THAT(read(tuple({6, tuple({})})), HasSubstr("number of parts"));
  EXPECT_THAT(read("x"), HasSubstr("found"));
}

}  // namespace
}  // namespace tessera::testing
