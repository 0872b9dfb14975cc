// Tests of packed (THD) batches: rows are joined with cumulative lengths, padding is handled, and invalid input is an
// error.
#include "tessera/data/nemo/thd.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "tessera/base/error.h"

namespace tessera::data {
namespace {

using ::testing::HasSubstr;

at::Tensor integers(const std::vector<std::vector<int64_t>>& rows) {
  std::vector<at::Tensor> tensors;
  for (const auto& row : rows) tensors.push_back(at::tensor(row, at::kLong));
  return at::stack(tensors);
}

std::vector<int64_t> list(const at::Tensor& tensor) {
  const auto flat = tensor.to(at::kLong).contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

using List = std::vector<int64_t>;

// Two rows of six tokens. The first has sequences of 3 (with one token of padding) and 2; the second has one of 6.
ThdInput two_rows() {
  return {.input_ids = integers({{1, 2, 3, 0, 4, 5}, {6, 7, 8, 9, 0, 1}}),
          .labels = at::arange(12).view({2, 6}),
          .position_ids = integers({{0, 1, 2, 0, 0, 1}, {0, 1, 2, 3, 4, 5}}),
          .seq_lens = integers({{3, 2}, {6, -1000}}),
          .seq_lens_padded = integers({{4, 2}, {6, -1000}})};
}

std::string refusal(const ThdInput& input, int64_t chunks = 1) {
  try {
    split_batch_into_thd_chunks(input, chunks);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kShape);
    return error.what();
  }
  return "no error";
}

TEST(Thd, RowsAreJoinedWithCumulativeSequenceLengths) {
  const auto input = two_rows();
  const auto batch = process_input_for_thd(input);
  EXPECT_TRUE(batch.input_ids.equal(input.input_ids.flatten()));
  EXPECT_TRUE(batch.labels.equal(at::arange(12)));
  EXPECT_TRUE(batch.position_ids.equal(input.position_ids.flatten()));
  EXPECT_EQ(list(batch.cu_seqlens), (List{0, 3, 5, 11}));
  EXPECT_EQ(list(batch.cu_seqlens_padded), (List{0, 4, 6, 12}));
  EXPECT_EQ(batch.cu_seqlens.scalar_type(), at::kInt);
  EXPECT_EQ(batch.max_seqlen, 6);
  EXPECT_EQ(list(batch.padding_mask), (List{0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0})) << "a token 0 is no padding";
  EXPECT_EQ(list(thd_document_ids(batch)), (List{0, 0, 0, -1, 1, 1, 2, 2, 2, 2, 2, 2}));
}

TEST(Thd, TrailingPaddingBelongsToTheLastSequence) {
  auto input = two_rows();
  input.seq_lens = integers({{4, 2}, {3, -1000}});
  for (const auto& padded : {input.seq_lens_padded, integers({{4, 2}, {3, -1000}})}) {
    input.seq_lens_padded = padded;
    const auto batch = process_input_for_thd(input);
    EXPECT_EQ(list(batch.cu_seqlens), (List{0, 4, 6, 12}));
    EXPECT_FALSE(batch.cu_seqlens_padded.defined());
    EXPECT_EQ(batch.max_seqlen, 6);
    EXPECT_EQ(list(batch.padding_mask), (List{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1}));
    EXPECT_EQ(list(thd_document_ids(batch)), (List{0, 0, 0, 0, 1, 1, 2, 2, 2, -1, -1, -1}));
  }
}

TEST(Thd, WithoutLengthsThePaddingTokenMarksPadding) {
  const auto batch = process_input_for_thd({.input_ids = integers({{1, 2, 0, 0}, {1, 2, 3, 4}})});
  EXPECT_EQ(list(batch.padding_mask), (List{0, 0, 1, 1, 0, 0, 0, 0}));
  EXPECT_FALSE(batch.cu_seqlens.defined());
  EXPECT_THAT(refusal({.input_ids = integers({{1, 0, 2, 0}})}), HasSubstr("before another token"));
  EXPECT_THAT(refusal({.input_ids = at::zeros({1, 2, 3})}), HasSubstr("without seq_lens"));
}

TEST(Thd, EmbeddingsAndMultiAxisPositionsKeepTheirAxes) {
  auto input = two_rows();
  input.input_ids = at::arange(36.0).view({2, 6, 3});
  input.position_ids = at::arange(36).view({3, 2, 6});
  const auto batch = process_input_for_thd(input);
  EXPECT_TRUE(batch.input_ids.equal(at::arange(36.0).view({12, 3})));
  EXPECT_TRUE(batch.position_ids.equal(at::arange(36).view({3, 1, 12})));
  const auto chunks = split_batch_into_thd_chunks(input, 2);
  EXPECT_TRUE(chunks.batch.position_ids[1].equal(input.position_ids.select(1, 1).unsqueeze(1)));
}

TEST(Thd, ChunksAreStackedAndTheirSequenceLengthsPadded) {
  const auto chunks = split_batch_into_thd_chunks(two_rows(), 2);
  EXPECT_EQ(chunks.chunks, 2);
  EXPECT_EQ(chunks.batch.input_ids.sizes(), (std::vector<int64_t>{2, 6}));
  EXPECT_EQ(list(chunks.batch.cu_seqlens), (List{0, 3, 5, 0, 6, -1000}));
  EXPECT_EQ(list(chunks.batch.cu_seqlens_padded), (List{0, 4, 6, 0, 6, -1000}));
  EXPECT_EQ(list(chunks.max_seqlen), (List{3, 6}));
  EXPECT_EQ(chunks.batch.max_seqlen, 6);
  auto second = chunks.batch;
  second.padding_mask = chunks.batch.padding_mask[1];
  second.cu_seqlens = chunks.batch.cu_seqlens[1];
  second.cu_seqlens_padded = chunks.batch.cu_seqlens_padded[1];
  EXPECT_EQ(thd_document_ids(second).sizes(), (std::vector<int64_t>{1, 6}));
  EXPECT_TRUE(thd_document_ids(second).le(0).all().item<bool>()) << "one document, and padding";
  const auto plain = split_batch_into_thd_chunks(two_rows(), 1);
  EXPECT_EQ(plain.chunks, 1);
  EXPECT_EQ(list(plain.batch.cu_seqlens), (List{0, 3, 5, 11}));
}

TEST(Thd, MismatchedShapesAreErrors) {
  EXPECT_THAT(refusal(two_rows(), 3), HasSubstr("2 rows for 3 chunks"));
  EXPECT_THAT(refusal({}), HasSubstr("wanted [B, S]"));
  const auto changed = [](auto change) {
    auto input = two_rows();
    change(input);
    return refusal(input);
  };
  EXPECT_THAT(changed([](ThdInput& in) { in.labels = at::zeros({2, 5}); }), HasSubstr("labels: found [2, 5]"));
  EXPECT_THAT(changed([](ThdInput& in) { in.position_ids = at::zeros({2, 5}); }), HasSubstr("position_ids"));
  EXPECT_THAT(changed([](ThdInput& in) { in.seq_lens = integers({{3, 2}}); }), HasSubstr("wanted [2, packs]"));
  EXPECT_THAT(changed([](ThdInput& in) { in.seq_lens = at::Tensor(); }), HasSubstr("wanted [2, packs]"));
  EXPECT_THAT(changed([](ThdInput& in) {
                in.seq_lens = integers({{5, 2}, {6, -1000}});
              }),
              HasSubstr("row 0, sequence 0: found 5 tokens and 4 with padding"));
  EXPECT_THAT(changed([](ThdInput& in) {
                in.seq_lens = integers({{3, -1000}, {6, -1000}});
              }),
              HasSubstr("only one of which is the value of an unused entry"));
  EXPECT_THAT(changed([](ThdInput& in) {
                in.seq_lens_padded = integers({{4, 3}, {6, -1000}});
              }),
              HasSubstr("within the row of 6"));
  EXPECT_THAT(changed([](ThdInput& in) {
                in.seq_lens = integers({{3, 1}, {6, -1000}});
                in.seq_lens_padded = integers({{3, 1}, {6, -1000}});
              }),
              HasSubstr("sum to 4, wanted all 6"));
}

}  // namespace
}  // namespace tessera::data
