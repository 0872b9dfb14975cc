#include "tessera/comm/group/signature.h"

#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

std::string describe_call(const RankSignature& call, const char* verb) {
  return fmt::format("rank {} of the group {}{}", call.first, verb, to_string(call.second));
}

}  // namespace

const char* dtype_name(int dtype) noexcept {
  using enum c10::ScalarType;
  constexpr std::pair<c10::ScalarType, const char*> kNames[] = {{Byte, "uint8"},
                                                                {Char, "int8"},
                                                                {Short, "int16"},
                                                                {Int, "int32"},
                                                                {Long, "int64"},
                                                                {Half, "float16"},
                                                                {Float, "float32"},
                                                                {Double, "float64"},
                                                                {ComplexFloat, "complex64"},
                                                                {ComplexDouble, "complex128"},
                                                                {Bool, "bool"},
                                                                {BFloat16, "bfloat16"}};
  const auto type = static_cast<c10::ScalarType>(dtype);
  for (const auto& [known, name] : kNames) {
    if (known == type) return name;
  }
  return dtype < 0 ? "" : c10::toString(type);
}

Signature sign(const SignatureFields& fields) noexcept {
  Signature result;
  result.sequence = fields.sequence;
  result.op = fields.op;
  result.reduce = fields.reduce;
  result.dtype = static_cast<int8_t>(fields.dtype);
  result.dims = static_cast<uint8_t>(fields.sizes.size());
  result.root = fields.root;
  result.tag = fields.tag;
  result.members = fields.members;
  result.elements = 1;
  for (size_t dim = 0; dim < fields.sizes.size(); ++dim) {
    result.elements *= fields.sizes[dim];
    if (dim < Signature::kMaxSizes) result.sizes[dim] = fields.sizes[dim];
  }
  put_text(result.group, fields.group);
  put_text(result.subject, fields.subject);

  // A send and its receive must have one hash although their fields differ (operation, peer, subject). So the hash of a
  // message is taken over a copy in which both ends have the same fields: sender, receiver, tag, number and tensor.
  // max(hash, 1) keeps 0 free for "no call".
  Signature hashed = result;
  if (is_message(fields.op)) {
    const bool sends = fields.op == Op::kSend;
    hashed.op = Op::kSend;
    hashed.root = sends ? fields.rank : fields.root;                                                // sender
    hashed.hash = static_cast<uint64_t>(static_cast<uint32_t>(sends ? fields.root : fields.rank));  // receiver
    std::memset(hashed.subject, 0, sizeof hashed.subject);
  }
  result.hash = std::max<uint64_t>(XXH3_64bits(&hashed, sizeof hashed), 1);
  return result;
}

std::string to_string(const Signature& signature) {
  std::string text = to_string(signature.op);
  if (is_reduction(signature.op)) text += fmt::format("({})", to_string(signature.reduce));
  if (signature.op == Op::kBroadcast || signature.op == Op::kScatter) text += fmt::format("(root {})", signature.root);
  if (is_message(signature.op)) {
    text += fmt::format("({} {}, tag {})", signature.op == Op::kSend ? "to" : "from", signature.root, signature.tag);
  }
  if (signature.dtype >= 0) {
    const int dims = std::min<int>(signature.dims, Signature::kMaxSizes);
    text += fmt::format(" of {}{} [{}{}]", signature.op == Op::kAllToAll ? "rows of " : "", dtype_name(signature.dtype),
                        fmt::join(signature.sizes, signature.sizes + dims, ", "), dims < signature.dims ? ", ..." : "");
  }
  if (signature.subject[0] && !is_message(signature.op)) text += fmt::format(" for {}", signature.subject);
  return text;
}

// Compares every call with the first one only: one pair of different calls explains the error.
std::string disagreement(const std::vector<RankSignature>& calls) {
  const auto other = std::ranges::find_if(
      calls, [&](const RankSignature& call) { return call.second.hash != calls.front().second.hash; });
  if (other == calls.end()) return "all ranks make the same call";
  return fmt::format("{}, {}. All ranks of a group must make the same calls in the same order",
                     describe_call(calls.front(), "calls "), describe_call(*other, ""));
}

void raise_disagreement(std::string_view group, const std::vector<RankSignature>& calls) {
  TESSERA_CHECK(calls.size() >= 2, ErrorKind::kInternal, "[comm.check] {} signatures: wanted at least 2", calls.size());
  const Signature& first = calls.front().second;
  throw Disagreement(fmt::format("[comm.{}] group '{}', call {}: {}.", to_string(first.op), group, first.sequence,
                                 disagreement(calls)));
}

}  // namespace tessera::comm
