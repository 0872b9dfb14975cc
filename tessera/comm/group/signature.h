// Description of a collective in a fixed number of bytes. Ranks compare signatures to detect different calls; the
// flight recorder stores them.
//
//   const Signature mine =
//       sign({.group = "dp", .sequence = 7, .op = Op::kAllReduce, .dtype = at::kFloat, .sizes = {4}});
//   if (theirs.hash != mine.hash) raise_disagreement("dp", {{0, mine}, {1, theirs}});
//
// A Signature may be copied byte by byte between processes of one build. No communication: signature_exchange.h and
// back-ends send signatures. Everything here is thread-safe.
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

  // Hash over all fields that must agree; 0 means no call. A send and its matching receive have equal hashes.
  uint64_t hash = 0;
  uint64_t sequence = 0;  // from 1; of a collective in its group, of a message per sender, receiver and tag
  Op op = Op::kNone;
  ReduceOp reduce = ReduceOp::kSum;  // used by reductions only
  int8_t dtype = -1;                 // c10::ScalarType; -1: no data
  uint8_t dims = 0;               // number of dims; `sizes` holds the first kMaxSizes, further ones only in `elements`
  int32_t root = -1;              // root of broadcast and scatter, peer of send and recv: a position in the group
  int32_t tag = 0;                // tag of send and recv
  uint32_t members = 0;           // id of the group (GroupContext::id), so groups of equal name differ
  int64_t elements = 0;           // of the tensor whose size must agree; for all-to-all, of one row
  int64_t sizes[kMaxSizes] = {};  // shape of that tensor
  char group[64] = {};            // name of the group, cut to fit, padded with zeros
  char subject[96] = {};          // parameter or module of the call, cut to fit, padded with zeros
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
  int rank = 0;  // the caller's position in the group; part of the hash of send and recv only
  std::string_view subject = "";
};
Signature sign(const SignatureFields& fields) noexcept;

// Copies `text` into a field of a signature, cut to fit.
template <size_t size>
void put_text(char (&field)[size], std::string_view text) {
  text.copy(field, size - 1);
}

// Name of a Signature::dtype, e.g. "float32". Types without a PyTorch name have c10's name; -1 gives "".
const char* dtype_name(int dtype) noexcept;
// Text such as "all_reduce(sum) of float32 [4, 8] for model.norm", without group and number of the call.
std::string to_string(const Signature& signature);

// A signature with the rank that made the call, as a position in the group.
using RankSignature = std::pair<int, Signature>;

// Text that shows the first two different calls, e.g. "rank 0 of the group calls all_reduce(sum) of float32 [4], rank 1
// of the group broadcast(root 0) of float32 [4]. All ranks of a group must make the same calls in the same order".
std::string disagreement(const std::vector<RankSignature>& calls);
// The error, of kind kComm, that is thrown when ranks of a group have made different calls although all ranks must make
// the same call.
class Disagreement final : public Error {
 public:
  explicit Disagreement(const std::string& message) : Error(ErrorKind::kComm, message) {}
};
// Throws Disagreement with operation, group, number of the call and disagreement(calls). `calls` holds at least two.
[[noreturn]] void raise_disagreement(std::string_view group, const std::vector<RankSignature>& calls);

// Interface of a back-end that compares signatures itself before it moves data, such as shared memory.
class ComparesSignatures {
 public:
  virtual ~ComparesSignatures() = default;
  // Sets the signature of the next collective on this back-end. The same thread must start that collective directly
  // after announce(). When signatures differ, the collective or its Work::wait() throws Disagreement on every rank.
  virtual void announce(const Signature& signature) = 0;
};

}  // namespace tessera::comm
