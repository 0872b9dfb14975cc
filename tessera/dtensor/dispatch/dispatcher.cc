// The kernel of every operation on DTensors. It looks up the plan of the call, or makes one, and runs it.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/dtensor/dispatch/dispatch.h"
#include "tessera/dtensor/dispatch/plan.h"
#include "tessera/dtensor/dispatch/plan_cache.h"
#include "tessera/dtensor/redistribute/autograd.h"

namespace tessera {

namespace {

// Finds the operation's rule and stores it in op.rule; called when a call has no cached plan. Returns false if there is
// no rule and the operation is decomposed by its CompositeExplicitAutograd kernel instead.
bool has_rule(const OpInfo& op) {
  if (op.rule.load(std::memory_order_acquire) != nullptr) return true;
  if (const Rule* rule = find_rule(op)) {
    op.rule.store(rule, std::memory_order_release);
    return true;
  }
  if (!op.is_in_place_view && op.handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
    op.handler.store(decompose, std::memory_order_release);
    return false;
  }
  return true;  // make_plan raises the error for a missing rule
}

// Redistributes the DTensor arguments that the operation modifies, so that they are Replicate on every mesh dim, and
// stores each result in the same tensor object. This is for derivative formulas that modify a tensor that they have
// made: the user cannot redistribute this tensor before the formula modifies it. Views and parameters are left
// unchanged. Returns false if no argument was redistributed. COLLECTIVE over the mesh.
bool replicate_written_args(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  bool moved = false;
  for (const int arg : op.tensor_args) {
    if (!op.args[arg].is_written || !args[arg].isTensor() || !is_dtensor(args[arg].toTensor())) continue;
    const at::Tensor& written = args[arg].toTensor();
    DTensorImpl& impl = *impl_of(written);
    const Placements whole(impl.placements().size(), Replicate());
    const bool parameter = written.is_leaf() && written.requires_grad();
    if (parameter || written.is_view() || impl.is_gathered_view() || impl.placements() == whole) continue;
    impl.shallow_copy_from(redistribute_values(written, whole, /*may_alias=*/false).getIntrusivePtr());
    moved = true;
  }
  return moved;
}

// Makes the plan of a call. Returns null if replicate_written_args() changed an argument, because the call then has
// another cache key.
std::shared_ptr<const Plan> make_plan_or_replicate(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  if (!op.writes_argument || !in_backward()) return make_plan(op, args);
  try {
    return make_plan(op, args);
  } catch (const Error&) {
    if (replicate_written_args(op, args)) return nullptr;
    throw;
  }
}

}  // namespace

// The cache key of the call is written to a thread-local buffer. A lookup first compares the key with that of one
// recent plan. The hash of the key is computed only if they differ.
void dispatch_by_rule(const OpInfo& op, c10::DispatchKeySet keys, Stack& stack) {
  const c10::ArrayRef<c10::IValue> args(stack.data() + stack.size() - op.args.size(), op.args.size());
  static thread_local CallKey key;
  const bool cacheable = key.assign(op, args);
  PlanCache& cache = PlanCache::of_this_thread();
  uint64_t hash = 0;
  const auto* known = cacheable ? cache.find_recent(key.words()) : nullptr;
  if (cacheable && known == nullptr) {
    hash = key.hash();
    known = cache.find(hash, key.words());
  }
  std::shared_ptr<const Plan> plan;
  if (known != nullptr) {
    plan = *known;
  } else if (!has_rule(op)) {
    return decompose(op, keys, &stack);
  } else {
    const CallKey own = key;  // rules that run operations on DTensors overwrite `key`
    plan = make_plan_or_replicate(op, args);
    if (plan == nullptr) return dispatch_by_rule(op, keys, stack);
    if (cacheable && plan->cacheable) cache.insert(hash, own.words(), plan);
  }
  run_plan(op, plan, stack);
}

namespace {

struct Kernel final : c10::OperatorKernel {
  explicit Kernel(const OpInfo* entry) : entry(entry) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) {
    at::AutoDispatchBelowADInplaceOrView below;
    if (const Handler handler = entry->handler.load(std::memory_order_acquire)) return handler(*entry, keys, stack);
    dispatch_by_rule(*entry, keys, *stack);
  }
  const OpInfo* entry;
};

// Runs for an operation that has no kernel under kDTensorKey: an operation of another library that is not composite and
// has no rule. make_plan() raises the error that says that the rule is missing.
struct FallbackKernel final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
    const OpInfo entry(handle);  // the entry has no rule, so make_plan raises an error
    make_plan(entry, c10::ArrayRef<c10::IValue>(stack->data() + stack->size() - entry.args.size(), entry.args.size()));
  }
};

// Holds all kernel registrations. The object is never destroyed, because libtorch's dispatcher may call its kernels
// until the process ends.
struct KernelRegistry {
  std::mutex mutex;
  torch::Library aten{torch::Library::IMPL, "aten", kDTensorKey, __FILE__, __LINE__};
  torch::Library aten_autograd{torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse3, __FILE__, __LINE__};
  torch::Library any{torch::Library::IMPL, "_", kDTensorKey, __FILE__, __LINE__};
  torch::Library any_autograd{torch::Library::IMPL, "_", c10::DispatchKey::AutogradPrivateUse3, __FILE__, __LINE__};
  std::vector<std::unique_ptr<torch::Library>> others;
  std::unordered_map<std::string, std::unique_ptr<OpInfo>> entries;

  void add(torch::Library& library, const c10::OperatorHandle& op) {
    auto entry = std::make_unique<OpInfo>(op);
    entry->handler = find_handler(entry->name);
    library.impl(entry->name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(entry.get())));
    entries.emplace(entry->name, std::move(entry));
  }

  KernelRegistry() {
    any.fallback(torch::CppFunction::makeFromBoxedFunctor(std::make_unique<FallbackKernel>()));
    // As on other back-ends, the backward of an operation without a derivative formula raises an error.
    any_autograd.fallback(torch::autograd::basicAutogradNotImplementedFallback());
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.getNamespace() != "aten") continue;
      const auto op = dispatcher.findSchema(name);
      if (op && !is_composite(*op)) add(aten, *op);
    }
    register_composites(aten, aten_autograd);
    register_operand_layouts(aten_autograd);
    register_view_replay(aten_autograd);
    register_folded_products(aten, aten_autograd);
    register_gathering_composites(aten, aten_autograd);
  }
};

KernelRegistry& registry() {
  static KernelRegistry* const made = new KernelRegistry();  // never destroyed, see KernelRegistry
  return *made;
}

}  // namespace

// Some operations have a composite kernel and a CPU kernel (silu_backward, mish_backward, native_channel_shuffle). They
// are not treated as composite but have rules, so that each operand is redistributed once and not at each use inside
// the composite kernel.
bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

void decompose(const OpInfo& op, c10::DispatchKeySet, Stack* stack) {
  std::optional<AllowInternalPlainTensors> plain;
  const auto args = c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - op.args.size());
  if (!has_plain_tensor(args)) plain.emplace(op.name);
  op.handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
}

void ensure_registered() { registry(); }

std::vector<c10::OperatorHandle> operations_named(const std::string& name) {
  const auto dot = name.find('.');
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorHandle> found;
  for (const auto& known : dispatcher.getAllOpNames()) {
    if (known.name != name.substr(0, dot) ||
        (dot != std::string::npos && known.overload_name != name.substr(dot + 1))) {
      continue;
    }
    if (const auto op = dispatcher.findSchema(known)) found.push_back(*op);
  }
  return found;
}

void ensure_kernels_of(const std::vector<c10::OperatorHandle>& operations) {
  KernelRegistry& all = registry();
  std::lock_guard lock(all.mutex);
  for (const auto& op : operations) {
    const auto& name = op.operator_name();
    const std::string ns(name.getNamespace().value_or(""));
    if (ns != "aten" && !is_composite(op) && !all.entries.contains(toString(name))) {
      all.others.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, ns, kDTensorKey, __FILE__, __LINE__));
      all.add(*all.others.back(), op);
    }
  }
}

}  // namespace tessera
