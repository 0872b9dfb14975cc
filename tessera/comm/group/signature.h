// What a collective is, in a fixed number of bytes: ranks compare it before data moves, the flight recorder keeps it.
//
//   const Signature mine = sign({.group = "dp", .sequence = 7, .op = Op::kAllReduce, .dtype = at::kFloat, .sizes =
//   {4}}); if (theirs.hash != mine.hash) raise_disagreement("dp", {{0, mine}, {1, theirs}});
//
// A Signature may be copied byte by byte between the processes of one build. No communication: signature_exchange.h and
// back-ends carry it. Everything here is thread-safe.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/group/op.h"
#include "tessera/comm/group/reduce_op.h"

namespace tessera::comm {

struct Signature {
  static constexpr int kMaxSizes = 6;

  // Of all that must agree; never 0 in a call. Equal for a send and the receive that belongs to it.
  uint64_t hash = 0;
  uint64_t sequence = 0;  // number of the collective in its group, of the message between its two ranks; from 1
  Op op = Op::kNone;
  ReduceOp reduce = ReduceOp::kSum;  // of reductions
  int8_t dtype = -1;                 // c10::ScalarType; -1: no data
  uint8_t dims = 0;                  // of `sizes`; beyond kMaxSizes only `elements` tells tensors apart
  int32_t root = -1;                 // of broadcast and scatter; the peer of send and recv: a position in the group
  int32_t tag = 0;                   // of send and recv
  uint32_t members = 0;              // hash of the group's ranks: groups of equal name differ
  int64_t elements = 0;              // of the tensor whose size must agree; in all-to-all of one row
  int64_t sizes[kMaxSizes] = {};     // its shape
  char group[64] = {};               // names, cut to fit, zeros behind
  char subject[96] = {};
};
static_assert(std::is_trivially_copyable_v<Signature> &&
              std::has_unique_object_representations_v<Signature>);  // no padding

struct SignatureFields {
  std::string_view group = "";
  uint32_t members = 0;
  uint64_t sequence = 0;
  Op op = Op::kNone;
  ReduceOp reduce = ReduceOp::kSum;
  int dtype = -1;
  c10::IntArrayRef sizes = {};
  int root = -1;
  int tag = 0;
  int rank = 0;  // of the caller in the group; enters the hash of send and recv only
  std::string_view subject = "";
};
Signature sign(const SignatureFields& fields) noexcept;

// Text in a field of a signature: cut to fit.
template <size_t size>
void put_text(char (&field)[size], std::string_view text) {
  text.copy(field, size - 1);
}

// Of Signature::dtype: "float32"; types that PyTorch has no name for keep c10's; "" for none.
const char* dtype_name(int dtype) noexcept;
// "all_reduce(sum) of float32 [4, 8] for model.norm"; no group, no number.
std::string to_string(const Signature& signature);

// Whose signature it is: a position in the group.
using SignedBy = std::pair<int, Signature>;

// "rank 0 of the group calls all_reduce(sum) of float32 [4], rank 1 of the group broadcast(root 0) of float32 [4]. All
// ranks of a group must make the same calls in the same order": the first of `calls` that differ and what to do.
std::string disagreement(const std::vector<SignedBy>& calls);
class Disagreement final : public Error {
 public:
  explicit Disagreement(const std::string& message) : Error(ErrorKind::kComm, message) {}
};
// Throws Disagreement: disagreement() with verb, group and number of the call in front. `calls` holds at least two.
[[noreturn]] void raise_disagreement(std::string_view group, const std::vector<SignedBy>& calls);

// A back-end that compares signatures itself, before it moves data (shared memory).
class ComparesSignatures {
 public:
  virtual ~ComparesSignatures() = default;
  // The signature of the next call of a collective on this back-end, which follows at once from the same thread. When
  // ranks disagree, that call or its Work::wait() ends with what raise_disagreement() throws, on every rank.
  virtual void announce(const Signature& signature) = 0;
};

}  // namespace tessera::comm
