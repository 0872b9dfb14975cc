// Types and functions that the rules of random operations share.
#pragma once

#include "tessera/base/error.h"
#include "tessera/dtensor/random/random_fill.h"
#include "tessera/dtensor/rules/table.h"

namespace tessera {

// One call of a random operation on local tensors. Gives access to the arguments by name and draws from the call's
// stream of random numbers.
class RandomCall {
 public:
  RandomCall(const LocalCall& call, const ShardRegion& region) : call_(call), region_(region) {}

  bool has(const char* name) const {
    const int at = call_.op.arg_named(name);
    return at >= 0 && !call_.arg(at).isNone();
  }
  c10::IValue& value(const char* name) const {
    const int at = call_.op.arg_named(name);
    TESSERA_CHECK(at >= 0, ErrorKind::kInternal, "[dtensor.random] {}: has no argument '{}'.", call_.op.name, name);
    return call_.arg(at);
  }
  double number(const char* name, double default_value = 0) const {
    return has(name) ? value(name).toScalar().toDouble() : default_value;
  }
  at::Tensor tensor(const char* name) const { return value(name).toTensor(); }
  bool is_tensor(const char* name) const { return has(name) && value(name).isTensor(); }
  const ShardRegion& region() const { return region_; }

  // Fills `part`, a tensor with the shape region().sizes, with random numbers. A meta tensor is not filled; then fill()
  // does not call key(), so the call is not counted as a random operation.
  void fill(const at::Tensor& part, const Distribution& distribution) {
    if (!part.is_meta()) fill_random(part, region_, key(), distribution);
  }
  at::Tensor uniform(const at::Tensor& like) {
    const auto type = like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor u = at::empty(region_.sizes, like.options().dtype(type));
    fill(u, {DistributionKind::kUniform, 0, 1});
    return u;
  }
  // Returns a bool tensor whose elements are true with probability p. `p` is a number or a tensor that broadcasts to
  // region().sizes.
  at::Tensor bernoulli_mask(const at::Tensor& like, const c10::IValue& p) {
    if (!p.isTensor()) return at::lt(uniform(like), p.toScalar());
    const at::Tensor& odds = p.toTensor();
    return at::lt(uniform(odds.is_floating_point() ? odds : like), odds);
  }

  // Returns the tensor that receives the result: the out= argument, self for an in-place form, or a new tensor like
  // `like`.
  at::Tensor result_tensor(const at::Tensor& like) const {
    if (has("out")) return tensor("out");
    if (call_.op.return_alias[0] >= 0) return call_.arg(call_.op.return_alias[0]).toTensor();
    at::TensorOptions options = like.options();
    if (has("dtype")) options = options.dtype(value("dtype").toScalarType());
    return at::empty_like(like, options,
                          has("memory_format") ? value("memory_format").toMemoryFormat() : at::MemoryFormat::Preserve);
  }
  void finish(const at::Tensor& result) const { call_.finish({result}); }
  const LocalCall& call() const { return call_; }
  // Returns the key of the random stream of this operation call. The first use of key() calls next_random_key(), which
  // adds 1 to the count of random operations, unless the call has a generator.
  const RandomStreamKey& key() {
    if (!key_) {
      key_ =
          next_random_key(call_.mesh, has("generator") ? value("generator").toOptional<at::Generator>() : std::nullopt);
    }
    return *key_;
  }

 private:
  const LocalCall& call_;
  const ShardRegion& region_;
  std::optional<RandomStreamKey> key_;
};

// Computes the result of a random operation on this rank.
using RandomKernel = void (*)(RandomCall&);

// Proposes a shard of each dim of the shape that the operands broadcast to, and runs `kernel` on the local tensors.
void propose_elementwise(const OpCall& call, Proposal& proposal, RandomKernel kernel);
inline Rule elementwise(RandomKernel kernel) {
  return [kernel](const OpCall& call, Proposal& proposal) { propose_elementwise(call, proposal, kernel); };
}

// Adds the rules of random_variates.cc to `table`.
void add_random_variate_rules(RuleTable& table);

}  // namespace tessera
