// Signatures of collectives: text, hash, and the message for two signatures that differ.
#include "tessera/comm/group/signature.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

SignatureFields call() {
  static const std::vector<int64_t> sizes = {4, 8};
  return {.group = "dp",
          .members = 7,
          .sequence = 3,
          .op = Op::kAllReduce,
          .dtype = static_cast<int>(at::kFloat),
          .sizes = sizes,
          .subject = "model.norm"};
}

TEST(Signature, TextDescribesTheCall) {
  EXPECT_EQ(to_string(sign(call())), "all_reduce(sum) of float32 [4, 8] for model.norm");
  auto fields = call();
  fields.op = Op::kScatter;
  fields.root = 2;
  EXPECT_EQ(to_string(sign(fields)), "scatter(root 2) of float32 [4, 8] for model.norm");
  EXPECT_EQ(to_string(sign({.group = "dp", .sequence = 1, .op = Op::kBarrier})), "barrier");
}

TEST(Signature, HashCoversEveryFieldThatMustAgree) {
  static const std::vector<int64_t> other_sizes = {8, 4};
  const auto differs = [](const auto& change) {
    auto fields = call();
    change(fields);
    return sign(fields).hash != sign(call()).hash;
  };
  EXPECT_FALSE(differs([](auto&) {}));
  EXPECT_FALSE(differs([](auto& fields) { fields.rank = 1; }));  // the calling rank is not part of the hash
  EXPECT_TRUE(differs([](auto& fields) { fields.sequence = 4; }));
  EXPECT_TRUE(differs([](auto& fields) { fields.members = 8; }));
  EXPECT_TRUE(differs([](auto& fields) { fields.op = Op::kReduceScatter; }));
  EXPECT_TRUE(differs([](auto& fields) { fields.reduce = ReduceOp::kMax; }));
  EXPECT_TRUE(differs([](auto& fields) { fields.dtype = static_cast<int>(at::kInt); }));
  EXPECT_TRUE(differs([&](auto& fields) { fields.sizes = other_sizes; }));
  EXPECT_TRUE(differs([](auto& fields) { fields.root = 1; }));
  EXPECT_TRUE(differs([](auto& fields) { fields.subject = "model.head"; }));
}

TEST(Signature, MatchingSendAndRecvHaveTheSameHash) {
  const std::vector<int64_t> sizes = {4};
  const auto send =
      sign({.group = "pp", .sequence = 1, .op = Op::kSend, .dtype = 6, .sizes = sizes, .root = 2, .tag = 5, .rank = 0});
  const auto recv =
      sign({.group = "pp", .sequence = 1, .op = Op::kRecv, .dtype = 6, .sizes = sizes, .root = 0, .tag = 5, .rank = 2});
  const auto other =
      sign({.group = "pp", .sequence = 1, .op = Op::kRecv, .dtype = 6, .sizes = sizes, .root = 0, .tag = 5, .rank = 1});
  EXPECT_EQ(send.hash, recv.hash);
  EXPECT_NE(send.hash, other.hash);
}

TEST(Signature, LongNamesAndManyDimsAreTruncated) {
  auto fields = call();
  const std::string name(1000, 'x');
  const std::vector<int64_t> sizes = {1, 2, 3, 4, 5, 6, 7, 8};
  fields.group = fields.subject = name;
  fields.sizes = sizes;
  const auto signature = sign(fields);
  EXPECT_EQ(std::string(signature.group).size(), sizeof signature.group - 1);
  EXPECT_EQ(signature.elements, 40320);
  EXPECT_THAT(to_string(signature), HasSubstr("[1, 2, 3, 4, 5, 6, ...]"));
}

TEST(Signature, DisagreementErrorNamesBothSides) {
  auto fields = call();
  fields.op = Op::kBarrier;
  const std::vector<RankSignature> calls = {{0, sign(call())}, {1, sign(call())}, {2, sign(fields)}};
  try {
    raise_disagreement("dp", calls);
  } catch (const Disagreement& error) {
    EXPECT_EQ(error.exit_code(), 4);
    EXPECT_THAT(error.what(),
                HasSubstr("[comm.all_reduce] group 'dp', call 3: rank 0 of the group calls all_reduce(sum)"));
    EXPECT_THAT(error.what(), HasSubstr("rank 2 of the group barrier"));
  }
}

}  // namespace
}  // namespace tessera::comm
