#include "tessera/kernels/logprobs/detail/local_columns.h"

#include "tessera/base/error.h"
#include "tessera/base/ignored_label.h"

namespace tessera::kernels::detail {

LocalColumns::LocalColumns(const at::Tensor& ids, const VocabShard& part)
    : is_local(ids.ge(part.start).logical_and_(ids.lt(part.end))),
      column(ids.sub(part.start).masked_fill_(is_local.logical_not(), 0)) {}

at::Tensor next_token_ids(const at::Tensor& ids) {
  auto next = at::full_like(ids, kIgnoredLabel);
  const int64_t length = ids.size(-1);
  if (length > 1) next.narrow(-1, 0, length - 1).copy_(ids.narrow(-1, 1, length - 1));
  return next;
}

void check_ids(const char* verb, const at::Tensor& logits, const at::Tensor& ids, bool many) {
  const auto leading = logits.sizes().slice(0, static_cast<size_t>(logits.dim() - 1));
  const auto found = ids.sizes();
  const bool fits = many ? ids.dim() >= 1 && found.slice(0, found.size() - 1) == leading : found == leading;
  TESSERA_CHECK(fits && ids.scalar_type() == at::kLong, ErrorKind::kShape,
                "[kernels.{}] found ids of shape {} and dtype {} for logits of {}, wanted int64 ids of {}{}", verb,
                c10::str(found), c10::toString(ids.scalar_type()), c10::str(logits.sizes()), c10::str(leading),
                many ? " with a last dim of K ids" : "");
}

void check_owned_once(const char* verb, const at::Tensor& ids, const at::Tensor& found, const VocabShard& part) {
  const auto wrong = found.ne(1).logical_and_(ids.ne(kIgnoredLabel));
  if (wrong.numel() == 0 || !wrong.any().item<bool>()) return;
  const auto at = wrong.flatten().nonzero()[0].item<int64_t>();
  raise(ErrorKind::kShape,
        "[kernels.{}] target {}: found id {}, a column of {} of the {} ranks; wanted a column of exactly one rank, or "
        "{}. This rank has the columns [{}, {}).",
        verb, at, ids.flatten()[at].item<int64_t>(), found.flatten()[at].to(at::kLong).item<int64_t>(), part.size(),
        kIgnoredLabel, part.start, part.end);
}

}  // namespace tessera::kernels::detail
