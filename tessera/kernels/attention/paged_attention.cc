#include "tessera/kernels/attention/paged_attention.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/kernels/simd/gemv_kernels.h"

namespace tessera::kernels {
namespace {

constexpr int64_t kMaxQueries = 24;          // queries of one block: they read each page together
constexpr int64_t kMinThreadWork = 1 << 15;  // multiply-adds below which a thread is not worth its start

// A unit of work: some tokens of one sequence, for all query heads of one KV head. A page is loaded once for all these
// queries. How the tokens are split into blocks does not change a result, because attend() computes each query
// independently of the others.
struct QueryBlock {
  const PagedSequence* sequence;
  int64_t first, tokens, kv_head;
};

void check_call(const PagedAttentionCall& call) {
  const auto &q = call.queries, &k = call.keys, &v = call.values;
  const auto fits = [](const at::Tensor& tensor) { return tensor.is_cpu() && tensor.scalar_type() == at::kFloat; };
  TESSERA_CHECK(fits(q) && fits(k) && fits(v) && q.dim() == 3 && q.is_contiguous() && k.dim() == 4 &&
                    k.sizes() == v.sizes() && k.strides() == v.strides() && k.size(2) == kPageTokens &&
                    k.size(3) == q.size(2) && k.stride(3) == 1 && k.stride(2) == k.size(3) &&
                    k.stride(1) == kPageTokens * k.size(3) && q.size(1) % k.size(1) == 0,
                ErrorKind::kShape,
                "[kernels.paged_attention] found queries {} and keys {}, wanted fp32 [N, heads, d] and "
                "[pages, kv_heads, {}, d] on the CPU",
                c10::str(q.sizes()), c10::str(k.sizes()), kPageTokens);
}

}  // namespace

at::Tensor paged_attention(const PagedAttentionCall& call) {
  check_call(call);
  const auto& q = call.queries;
  const int64_t heads = q.size(1), d = q.size(2), kv_heads = call.keys.size(1), group = heads / kv_heads;
  // Tokens per block: with `group` query heads per KV head, a block has up to kMaxQueries queries.
  const int64_t block_tokens = std::max<int64_t>(1, kMaxQueries / group);
  const auto out = at::empty_like(q);
  std::vector<QueryBlock> query_blocks;
  int64_t work = 0;
  for (const auto& sequence : call.sequences) {
    work += sequence.rows * (sequence.first_position + sequence.rows) * heads * d;
    for (int64_t first = 0; first < sequence.rows; first += block_tokens) {
      for (int64_t head = 0; head < kv_heads; ++head) {
        query_blocks.push_back({&sequence, first, std::min(block_tokens, sequence.rows - first), head});
      }
    }
  }
  const float* queries = q.const_data_ptr<float>();
  const float *keys = call.keys.const_data_ptr<float>(), *values = call.values.const_data_ptr<float>();
  float* results = out.data_ptr<float>();
  const int64_t page_stride = call.keys.stride(0), head_stride = call.keys.stride(1);
  const double scale = call.scale > 0 ? call.scale : 1 / std::sqrt(static_cast<double>(d));
  const auto count = static_cast<int64_t>(query_blocks.size());
  // The grain size of parallel_for() gives each thread at least kMinThreadWork multiply-adds.
  at::parallel_for(
      0, count, std::max<int64_t>(1, count * kMinThreadWork / std::max<int64_t>(1, work)),
      [&](int64_t begin, int64_t end) {
        std::vector<const float*> key_pages, value_pages;
        std::vector<float> scratch(static_cast<size_t>(scratch_floats(block_tokens * group, d, kPageTokens)));
        for (int64_t i = begin; i < end; ++i) {
          const auto& query_block = query_blocks[static_cast<size_t>(i)];
          const auto& sequence = *query_block.sequence;
          key_pages.clear();
          value_pages.clear();
          for (const int32_t page : sequence.pages) {
            key_pages.push_back(keys + page * page_stride + query_block.kv_head * head_stride);
            value_pages.push_back(values + page * page_stride + query_block.kv_head * head_stride);
          }
          const int64_t at = ((sequence.first_row + query_block.first) * heads + query_block.kv_head * group) * d;
          gemv_kernels().attend({.queries = queries + at,
                                 .out = results + at,
                                 .token_stride = heads * d,
                                 .tokens = query_block.tokens,
                                 .group = group,
                                 .head_dim = d,
                                 .first_position = sequence.first_position + query_block.first,
                                 .window = call.window,
                                 .scale = static_cast<float>(scale),
                                 .softcap = static_cast<float>(call.softcap),
                                 .keys = key_pages.data(),
                                 .values = value_pages.data(),
                                 .page_tokens = kPageTokens,
                                 .scratch = scratch.data()});
        }
      });
  return out;
}

}  // namespace tessera::kernels
