// Tests of pickles as data: the stack machine, refused pickles, and that written pickles read back equal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "tessera/formats/torch/pickler.h"
#include "tessera/formats/torch/unpickler.h"
#include "tests/formats/file_bytes.h"
#include "tests/formats/torch_pattern.h"

namespace tessera {
namespace {

using testing::bytes_of_text;
using testing::error_of;
using ::testing::HasSubstr;

// Bytes of a pickle from a C++ literal, which may contain zero bytes.
template <size_t N>
std::string bytes(const char (&text)[N]) {
  return {text, N - 1};
}

PickleValue read_pickle(const std::string& text) { return unpickle(bytes_of_text(text), "p"); }
std::string refusal_of(const std::string& text) {
  return error_of(ErrorKind::kFormat, [&] { read_pickle(text); });
}

PickleValue random_value(std::mt19937& random, int depth) {
  const auto items = [&] {
    PickleValue::Items made;
    for (uint32_t i = random() % 4; i > 0; --i) made.push_back(random_value(random, depth - 1));
    return made;
  };
  const auto pairs = [&] {
    std::vector<PickleValue::Pair> made;
    for (uint32_t i = 0; i < random() % 4; ++i) {
      made.emplace_back(PickleValue("k" + std::to_string(i)), random_value(random, depth - 1));
    }
    return made;
  };
  switch (random() % (depth > 0 ? 14 : 7)) {
    case 0:
      return nullptr;
    case 1:
      return random() % 2 == 0;
    case 2:
      return static_cast<int64_t>(static_cast<uint64_t>(random()) << 32 | random()) >> random() % 64;
    case 3:
      return std::bit_cast<double>(static_cast<uint64_t>(random()) << 32 | random());
    case 4:
      return std::string(random() % 300, 'x') + "\u00e9\u4e2d" + std::to_string(random() % 3);
    case 5:
      return PickleValue::bytes(std::string(random() % 300, static_cast<char>(random())));
    case 6:
      return PickleValue::global("torch", random() % 2 ? "float32" : "bfloat16");
    case 7:
      return PickleValue::list(items());
    case 8:
      return PickleValue::tuple(items());
    case 9:
      return PickleValue::set({static_cast<int64_t>(random() % 9), "one"});
    case 10:
      return PickleValue::dict(pairs());
    case 11:
      return PickleValue::ordered_dict(pairs());
    case 12:
      return PickleValue::call(PickleValue::global("torch", "Size"), {PickleValue::tuple({1, 2})});
    default:
      return PickleValue::instance(PickleValue::global("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
                                   PickleValue::dict({{"offsets", random_value(random, depth - 1)}}));
  }
}

TEST(TorchPickle, RandomValuesReadBackTheSameInBothProtocols) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const auto value = random_value(random, 6);
    for (const int protocol : {2, 4}) {
      const auto text = pickle(value, {.protocol = protocol});
      const auto read = read_pickle(text);
      ASSERT_TRUE(is_same_pickle(value, read)) << value.describe() << " became " << read.describe();
      ASSERT_EQ(pickle(read, {.protocol = protocol}), text);
    }
  }
}

TEST(TorchPickle, IntegersAtOpcodeLimitsRoundTrip) {
  std::vector<int64_t> edges{0,
                             255,
                             256,
                             65535,
                             65536,
                             -1,
                             -128,
                             -129,
                             std::numeric_limits<int64_t>::min(),
                             std::numeric_limits<int64_t>::max()};
  for (const int64_t edge : {int64_t{1} << 31, int64_t{1} << 32, -(int64_t{1} << 31)}) {
    for (const int64_t step : {-1, 0, 1}) edges.push_back(edge + step);
  }
  for (const int64_t edge : edges) EXPECT_EQ(read_pickle(pickle(edge, {.protocol = 2})).as_int(), edge);
  EXPECT_EQ(read_pickle(bytes("\x80\x02\x8a\x00.")).as_int(), 0);
  EXPECT_EQ(read_pickle(bytes("\x80\x02\x8a\x01\xff.")).as_int(), -1);
  EXPECT_EQ(read_pickle(bytes("\x80\x02\x8a\x03\x00\x00\x80.")).as_int(), -(1 << 23));
}

TEST(TorchPickle, MemoReferencesAreTheSameNode) {
  // x = [1]; [x, x, "t", "t"], with MEMOIZE, BINPUT and LONG_BINPUT.
  const auto value =
      read_pickle(bytes("\x80\x04\x95\x01\x00\x00\x00\x00\x00\x00\x00]\x94(]\x94K\x01"
                        "ah\x01\x8c\x01tr\x05\x00\x00\x00j\x05\x00\x00\x00"
                        "e."));
  ASSERT_EQ(value.items().size(), 4U);
  EXPECT_EQ(value.items()[0].identity(), value.items()[1].identity());
  EXPECT_EQ(value.items()[2].identity(), value.items()[3].identity());
  EXPECT_EQ(value.items()[0].items()[0].as_int(), 1);
  // A memo reference works after its value was popped, too.
  EXPECT_EQ(read_pickle(bytes("\x80\x02K\x07q\x00"
                              "0h\x00."))
                .as_int(),
            7);
  EXPECT_EQ(read_pickle(bytes("\x80\x02K\x07(K\x08K\x09"
                              "1."))
                .as_int(),
            7);
}

TEST(TorchPickle, BuiltinTypesAreRecognisedInEveryPickledForm) {
  const auto set =
      read_pickle(bytes("\x80\x02"
                        "c__builtin__\nset\n]K\x01"
                        "a\x85R."));
  EXPECT_EQ(set.kind(), PickleKind::kSet);
  EXPECT_EQ(set.items().size(), 1U);
  EXPECT_EQ(read_pickle(bytes("\x80\x02"
                              "c_codecs\nencode\nX\x03\x00\x00\x00"
                              "a\xc3\xbfX\x06\x00\x00\x00latin1\x86R."))
                .as_bytes(),
            "a\xff");
  EXPECT_EQ(read_pickle(bytes("\x80\x02"
                              "c__builtin__\nbytes\n)R."))
                .as_bytes(),
            "");
  const auto ordered =
      read_pickle(bytes("\x80\x02"
                        "ccollections\nOrderedDict\n)R(U\x01"
                        "aK\x01U\x01"
                        "bK\x02u}U\x01vK\x03sb."));
  ASSERT_TRUE(ordered.is_ordered_dict());
  ASSERT_EQ(ordered.dict_size(), 2U);
  EXPECT_EQ(ordered.key(1).as_text(), "b");
  EXPECT_EQ(ordered.find("a")->as_int(), 1);
  EXPECT_EQ(ordered.state().find("v")->as_int(), 3);
  const auto pairs =
      read_pickle(bytes("\x80\x02"
                        "ccollections\nOrderedDict\n]]U\x01"
                        "aaK\x05"
                        "aa\x85R."));
  EXPECT_EQ(pairs.find("a")->as_int(), 5);
  const auto path =
      read_pickle(bytes("\x80\x02"
                        "cpathlib._local\nPosixPath\nU\x01/U\x01"
                        "a\x86R."));
  EXPECT_TRUE(path.is_object("pathlib.PosixPath"));
}

TEST(TorchPickle, GlobalsOutsideTheAllowListAreRefusedByName) {
  EXPECT_THAT(refusal_of(bytes("\x80\x02"
                               "cos\nsystem\nX\x02\x00\x00\x00ls\x85R.")),
              HasSubstr("refers to 'os.system'"));
  EXPECT_THAT(refusal_of(bytes("\x80\x02"
                               "cposix\nsystem\n.")),
              HasSubstr("'posix.system'"));
  EXPECT_THAT(refusal_of(bytes("\x80\x02"
                               "c__builtin__\neval\n.")),
              HasSubstr("'__builtin__.eval'"));
  EXPECT_THAT(refusal_of(bytes("\x80\x04\x8c\x08"
                               "builtins\x8c\x04"
                               "exec\x93.")),
              HasSubstr("'builtins.exec'"));
  EXPECT_THAT(refusal_of(bytes("\x80\x04\x8c\x08"
                               "builtins\x8c\x07getattr\x93.")),
              HasSubstr("'builtins.getattr'"));
  EXPECT_THAT(refusal_of(bytes("\x80\x02"
                               "ctorch\nload\n.")),
              HasSubstr("'torch.load'"));
  EXPECT_THAT(refusal_of(bytes("\x80\x02"
                               "ctorch.Size\n__init__\n.")),
              HasSubstr("'torch.Size.__init__'"));
  EXPECT_THAT(refusal_of(bytes("\x80\x02"
                               "ca\x1b[31m\nb\n.")),
              HasSubstr("'a\\x1b[31m.b'"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [] { pickle(PickleValue::global("os", "system"), {.protocol = 4}); }),
              HasSubstr("'os.system' cannot be written"));
}

TEST(TorchPickle, ValuesThatContainThemselvesAreRefused) {
  EXPECT_THAT(refusal_of(bytes("\x80\x02]q\x00h\x00"
                               "a.")),
              HasSubstr("into itself"));
  EXPECT_THAT(refusal_of(bytes("\x80\x02]q\x00]h\x00"
                               "aa.")),
              HasSubstr("is part of another value already"));
  EXPECT_THAT(refusal_of(bytes("\x80\x02}q\x00K\x01h\x00s.")), HasSubstr("into itself"));
  EXPECT_THAT(refusal_of(bytes("\x80\x02"
                               "ccollections\nOrderedDict\n)Rq\x00h\x00"
                               "b.")),
              HasSubstr("into itself"));
  EXPECT_THAT(refusal_of(bytes("\x80\x02]q\x00h\x00\x85q\x01"
                               "0h\x00h\x01"
                               "a.")),
              HasSubstr("already"));
}

TEST(TorchPickle, ReferenceBombsAndDeepNestingAreRefused) {
  std::string bomb = bytes("\x80\x02]q\x00");
  for (int i = 0; i < 60; ++i) {
    bomb += bytes("h") + static_cast<char>(i) + "h" + static_cast<char>(i) + "\x86q" + static_cast<char>(i + 1);
  }
  bomb += std::string(60, '0') + "0h" + static_cast<char>(60) + ".";
  EXPECT_THAT(refusal_of(bomb), HasSubstr("written out without references"));
  // One long text with 200,000 references to it.
  std::string echo = bytes("\x80\x02X\x00\x00\x10\x00") + std::string(1 << 20, 'x') +
                     bytes(
                         "q\x00"
                         "0](");
  for (int i = 0; i < 200'000; ++i) echo += bytes("h\x00");
  EXPECT_THAT(refusal_of(echo + "e."), HasSubstr("written out without references"));
  const auto nested = [](int depth) {
    return bytes("\x80\x02") + std::string(static_cast<size_t>(depth), ']') +
           std::string(static_cast<size_t>(depth) - 1, 'a') + ".";
  };
  EXPECT_NO_THROW(read_pickle(nested(100)));
  EXPECT_THAT(refusal_of(nested(101)), HasSubstr("nested more than 100 deep"));
  EXPECT_THAT(refusal_of(nested(1'000'000)), HasSubstr("nested more than 100 deep"));
  EXPECT_NO_THROW(read_pickle(bytes("\x80\x02") + std::string(1'000'000, ']') + bytes("N.").insert(0, 1'000'000, '0')));
  PickleValue deep = 1;
  for (int i = 0; i < 89; ++i) deep = PickleValue::list({deep});
  EXPECT_NO_THROW(read_pickle(pickle(deep, {.protocol = 2})));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { pickle(PickleValue::list({deep}), {.protocol = 4}); }),
              HasSubstr("nested more than 90 deep"));
}

struct BadPickle {
  const char* name;
  std::string text;
  const char* message;
};

const std::vector<BadPickle> kBadPickles = {
    {"Empty", "", "cut off"},
    {"NoPickle", "hello", "no pickle of protocol 2"},
    {"Protocol1", bytes("\x80\x01N."), "protocol 1"},
    {"Protocol6", bytes("\x80\x06N."), "protocol 6"},
    {"NoStop", bytes("\x80\x02N"), "cut off"},
    {"NothingAtStop", bytes("\x80\x02."), "nothing is left on the stack"},
    {"TwoAtStop", bytes("\x80\x02NN."), "left over"},
    {"MarkAtStop", bytes("\x80\x02N(."), "nothing is left"},
    {"Trailing", bytes("\x80\x02N.N"), "1 bytes follow"},
    {"LongText",
     bytes("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f"
           "a."),
     "are needed, 2 are left"},
    {"LongBytes",
     bytes("\x80\x02"
           "B\xff\xff\xff\xff"
           "a."),
     "are needed, 2 are left"},
    {"LongFrame", bytes("\x80\x04\x95\xff\x00\x00\x00\x00\x00\x00\x00N."), "a frame of 255 bytes"},
    {"NoUtf8", bytes("\x80\x02X\x01\x00\x00\x00\xff."), "no UTF-8"},
    {"BigInteger",
     bytes("\x80\x02\x8a\x09"
           "123456789."),
     "an integer of 9 bytes"},
    {"HugeInteger", bytes("\x80\x02\x8b\x00\x00\x00\x10."), "an integer of 268435456 bytes"},
    {"UnknownOpcode", bytes("\x80\x02\xff."), "opcode 0xff is not supported"},
    {"Extension", bytes("\x80\x02\x82\x01."), "opcode 0x82"},
    {"Instance", bytes("\x80\x02(ios\nsystem\n."), "opcode 0x69"},
    {"NewObjEx", bytes("\x80\x04\x92."), "opcode 0x92"},
    {"BinGet", bytes("\x80\x02h\x05."), "memo entry 5 was never set"},
    {"LongBinPut", bytes("\x80\x02Nr\xff\xff\xff\xff."), "memo entry 4294967295 in a pickle"},
    {"MemoizeNothing", bytes("\x80\x04\x94."), "nothing is left on the stack"},
    {"AppendToTuple", bytes("\x80\x02)Na."), "APPEND on a tuple"},
    {"SetItemsOdd", bytes("\x80\x02}(Nu."), "a key that has no value"},
    {"SetItemOnList", bytes("\x80\x02]NNs."), "SETITEM on a list"},
    {"AddItemsOnDict", bytes("\x80\x04}(N\x90."), "ADDITEMS on a dict"},
    {"PopBelowMark", bytes("\x80\x02N(\x85."), "nothing is left on the stack"},
    {"NoMark", bytes("\x80\x02Nt."), "no mark"},
    {"TwiceKey",
     bytes("\x80\x02}(U\x01"
           "aNU\x01"
           "bNU\x01"
           "aNu."),
     "'a' is twice"},
    {"TwiceKeyInner", bytes("\x80\x02]}(K\x01NK\x01Nua."), "key 1 is twice"},
    {"TwiceInSet", bytes("\x80\x04\x8f(K\x01K\x01\x90."), "key 1 is twice"},
    {"ReduceText",
     bytes("\x80\x02U\x01"
           "a)R."),
     "REDUCE of 'a'"},
    {"ReduceNoTuple",
     bytes("\x80\x02"
           "ctorch\nSize\nNR."),
     "REDUCE with None"},
    {"NewObjArgs",
     bytes("\x80\x02"
           "ctorch\nSize\nN\x85\x81."),
     "NEWOBJ with a tuple of 1 values"},
    {"NewObjText", bytes("\x80\x02N)\x81."), "NEWOBJ of None"},
    {"BuildOnList", bytes("\x80\x02]}b."), "BUILD on a list"},
    {"BuildTwice",
     bytes("\x80\x02"
           "ctorch\ndevice\n)\x81}b}b."),
     "BUILD twice on a torch.device"},
    {"BuildNumber",
     bytes("\x80\x02"
           "ctorch\ndevice\n)\x81K\x01"
           "b."),
     "wanted a dict or tuple"},
    {"SetOfText",
     bytes("\x80\x02"
           "c__builtin__\nset\nU\x01"
           "a\x85R."),
     "a set whose argument is not a list"},
    {"EncodeUtf8",
     bytes("\x80\x02"
           "c_codecs\nencode\nU\x01"
           "aU\x04utf8\x86R."),
     "_codecs.encode"},
    {"EncodeWide",
     bytes("\x80\x02"
           "c_codecs\nencode\nU\x02\xc4\x80U\x06latin1\x86R."),
     "not in latin1"},
    {"GlobalNoLine",
     bytes("\x80\x02"
           "ctorch"),
     "a name without an end"},
    {"StackGlobalNumbers", bytes("\x80\x04K\x01K\x02\x93."), "STACK_GLOBAL without names"},
};

class TorchPickleRefuses : public ::testing::TestWithParam<BadPickle> {};
TEST_P(TorchPickleRefuses, MalformedPicklesWithTheReason) {
  EXPECT_THAT(refusal_of(GetParam().text), HasSubstr(GetParam().message));
}
INSTANTIATE_TEST_SUITE_P(, TorchPickleRefuses, ::testing::ValuesIn(kBadPickles),
                         [](const auto& info) { return info.param.name; });

TEST(TorchPickle, RepeatedExpansionOfOneValueIsRefused) {
  // The memo has a list of 50,000 values, and sets are made from this list. The sets stay on the stack, or are popped
  // at once.
  const std::string list = bytes("\x80\x02](") + std::string(50'000, 'N') +
                           bytes(
                               "eq\x00"
                               "c__builtin__\nset\nq\x01");
  for (const auto& call : {bytes("h\x01h\x00\x85R"), bytes("h\x01h\x00\x85R0")}) {
    std::string pickle = list;
    for (int i = 0; i < 4'000; ++i) pickle += call;
    EXPECT_THAT(refusal_of(pickle + "."), HasSubstr("it makes values of more than"));
  }
}

TEST(TorchPickle, DamagedPicklesAreReadOrRefused) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto text = pickle(random_value(random, 6), {.protocol = 4});
  for (size_t size = 0; size < text.size(); ++size) ASSERT_NE(refusal_of(text.substr(0, size)), "");
  for (int flip = 0; flip < 2000; ++flip) {
    auto damaged = text;
    for (uint32_t i = 0; i < 1 + random() % 3; ++i) damaged[random() % damaged.size()] = static_cast<char>(random());
    try {
      read_pickle(damaged);
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kFormat) << error.what();
    }
  }
}

TEST(TorchPickle, AccessorErrorsNameTheFoundValue) {
  EXPECT_THAT(error_of(ErrorKind::kFormat, [] { PickleValue("a\n").as_int(); }),
              HasSubstr("found 'a\\n', wanted an int"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [] { PickleValue(true).as_int(); }), HasSubstr("found True"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [] { PickleValue(1).as_float(); }), HasSubstr("found 1, wanted a float"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [] { PickleValue().items(); }), HasSubstr("found None"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [] { PickleValue("\xff"); }), HasSubstr("no UTF-8"));
}

}  // namespace
}  // namespace tessera
