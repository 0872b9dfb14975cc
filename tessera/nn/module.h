// The base of all layers and models: named parameters, buffers, children, and hooks around the call.
//
//   struct Linear : nn::Callable<Linear> {
//     at::Tensor weight;
//     Linear(int64_t in, int64_t out) { weight = register_parameter("weight", weight, at::empty({out, in})); }
//     at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
//   };
//   auto y = linear(x);                      // pre-hooks, forward, post-hooks
//
// A parameter is a plain at::Tensor member that is registered by address. This member is the parameter's slot: forward
// reads the tensor in it. Under FSDP the slot holds the unsharded tensor during forward, while parameters() still
// returns the sharded DTensor, so optimizers keep their parameters. Modules cannot be copied or moved; parents hold
// children by shared_ptr. Ranks that run as threads of one process must not share a module.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera::nn {

class Module;

struct ParameterSlot {
  std::string name;
  at::Tensor* slot = nullptr;  // the member that forward reads
  at::Tensor parameter;        // the tensor that parameters() returns and the optimizer updates
  bool decay = true;           // false: no weight decay by default (norms, biases)
  double initial = 0;          // initial value of a vector's elements; matrices are initialised at random
};

struct BufferSlot {
  std::string name;
  at::Tensor* slot = nullptr;
  bool persistent = false;  // part of the state dict
};

struct NamedParameter {
  std::string name;  // dotted path (FQN) from the module on which named_parameters() was called
  ParameterSlot* slot;
  Module* owner;
};

// Hooks get every tensor among the arguments (or results) of a call and may replace them.
using TensorRefs = std::vector<at::Tensor*>;
using ForwardPreHook = std::function<void(Module&, TensorRefs& inputs)>;
using ForwardHook = std::function<void(Module&, TensorRefs& outputs)>;
using ForwardHookWithInputs = std::function<void(Module&, const TensorRefs& inputs, TensorRefs& outputs)>;

// A function that is made for one call of a module. It runs the module's forward on `inputs` in place of the input
// tensors of that call, and returns the outputs.
using ForwardFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
// A wrapper of forward, for activation checkpointing. It is used only in grad mode; hooks run outside of it. The
// ForwardWrapper is called before forward. Then forward runs in no-grad mode. Then the WrapOutputs that the
// ForwardWrapper returned is called with the inputs and outputs; it makes the outputs results of an autograd node of
// its own. The backward of this node may call `rerun` to run forward again on other input tensors.
using WrapOutputs = std::function<void(const TensorRefs& inputs, TensorRefs& outputs, ForwardFunction rerun)>;
using ForwardWrapper = std::function<WrapOutputs(Module&)>;

// One call of a forward that returns one tensor, for code that may replay the call instead of running it (CUDA graphs).
struct ForwardCall {
  TensorRefs tensors;  // the tensors that hooks see, then the other tensors that forward reads from the arguments
  // The numbers, besides tensors and their shapes, that determine which kernels forward launches. Two calls with equal
  // numbers and equal shapes launch the same kernels. Nullopt: the call cannot be replayed.
  std::optional<std::vector<int64_t>> numbers;
  ForwardFunction run;  // runs forward with its wrapper on other tensors in place of `tensors`
};
// A function that a module call runs in place of forward and its ForwardWrapper, to replay the CUDA graph of a layer.
// It is called only in grad mode, after the module's pre-forward hooks and before its post-forward hooks. It returns
// the result of the call, or nullopt; after nullopt, forward runs as usual.
using ForwardReplay = std::function<std::optional<at::Tensor>(Module&, const ForwardCall&)>;

class Module {
 public:
  Module() = default;
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // Returns each parameter once, in registration order: a module's own parameters, then those of its children. A
  // parameter that two modules share (tied weights: both slots hold the same tensor) is listed for the first module
  // only, unless `all` is true.
  std::vector<NamedParameter> named_parameters(bool all = false);
  std::vector<at::Tensor> parameters();
  // Returns this module with the path "", then all modules below it, depth-first. A module that several parents share
  // is listed once.
  std::vector<std::pair<std::string, Module*>> named_modules();
  void for_each_module(const std::function<void(Module&)>& visit);  // same modules, same order
  const std::vector<std::pair<std::string, std::shared_ptr<Module>>>& named_children() const { return children_; }
  // Replaces a child: the parent's member then holds `replacement`, which must be of the member's type or derive from
  // it (such as a wrapper that overrides forward). Null removes the child; the parent's forward must then support a
  // null member. Error kConfig: no such child, another type, or a child that was registered without a member.
  void replace_child(const std::string& name, const std::shared_ptr<Module>& replacement);
  std::vector<ParameterSlot>& own_parameters() { return parameters_; }
  std::vector<BufferSlot>& own_buffers() { return buffers_; }

  // Replaces a parameter: the slot and parameters() both hold `value` afterwards.
  static void set_parameter(ParameterSlot& slot, const at::Tensor& value);

  void train(bool on = true);
  bool training() const { return training_; }
  void zero_grad();  // sets all gradients to undefined
  void set_requires_grad(bool on);

  // Pre-hooks run before forward and other hooks after it, both in registration order. remove_hook() takes the id that
  // the registration returned.
  int register_forward_pre_hook(ForwardPreHook hook);
  int register_forward_hook(ForwardHook hook);
  int register_forward_hook(ForwardHookWithInputs hook);  // gets the inputs as forward got them
  void remove_hook(int id);
  bool has_registered_hooks() const { return !pre_hooks_.empty() || !post_hooks_.empty(); }
  bool has_hooks() const { return has_registered_hooks() || wrapper_ || replay_; }
  // Sets the ForwardWrapper of this module, in place of an earlier one: a module has at most one. An empty function
  // removes the ForwardWrapper.
  void set_forward_wrapper(ForwardWrapper wrapper) { wrapper_ = std::move(wrapper); }
  const ForwardWrapper& forward_wrapper() const { return wrapper_; }
  // A module has at most one ForwardReplay; an empty function removes the ForwardReplay. A ForwardReplay has no effect
  // on modules whose forward does not return exactly one tensor.
  void set_forward_replay(ForwardReplay replay) { replay_ = std::move(replay); }
  const ForwardReplay& forward_replay() const { return replay_; }

  // The state of FSDP or DDP for this module. The module owns it.
  struct ModuleState {
    virtual ~ModuleState() = default;
  };
  const std::shared_ptr<ModuleState>& sharding() const { return sharding_; }
  void set_sharding(std::shared_ptr<ModuleState> state) { sharding_ = std::move(state); }
  // Returns true for the first call only. distribute_module (parallel/modules) uses it to process a module once.
  bool mark_distributed() { return !std::exchange(distributed_, true); }

 protected:
  at::Tensor register_parameter(std::string name, at::Tensor& slot, at::Tensor value, bool decay = true,
                                double initial = 0);
  at::Tensor register_buffer(std::string name, at::Tensor& slot, at::Tensor value, bool persistent = false);
  template <class M>
  std::shared_ptr<M> register_module(std::string name, std::shared_ptr<M> child) {
    children_.emplace_back(std::move(name), child);
    child_slots_.emplace_back();
    return child;
  }
  // Registers a child that replace_child() can replace: `slot` is the member that holds it.
  template <class M>
  void register_module(std::string name, std::shared_ptr<M>& slot, std::shared_ptr<std::type_identity_t<M>> child) {
    slot = std::move(child);
    children_.emplace_back(std::move(name), slot);
    child_slots_.emplace_back([&slot](const std::shared_ptr<Module>& replacement) {
      auto typed = std::dynamic_pointer_cast<M>(replacement);
      if (replacement && !typed) return false;
      slot = std::move(typed);
      return true;
    });
  }

  void run_pre_hooks(TensorRefs& inputs);
  void run_post_hooks(const TensorRefs& inputs, TensorRefs& outputs);

 private:
  std::vector<ParameterSlot> parameters_;
  std::vector<BufferSlot> buffers_;
  std::vector<std::pair<std::string, std::shared_ptr<Module>>> children_;
  std::vector<std::function<bool(const std::shared_ptr<Module>&)>> child_slots_;  // set the member; empty: fixed
  std::vector<std::pair<int, ForwardPreHook>> pre_hooks_;
  std::vector<std::pair<int, ForwardHookWithInputs>> post_hooks_;
  ForwardWrapper wrapper_;
  ForwardReplay replay_;
  std::shared_ptr<ModuleState> sharding_;
  int next_hook_id_ = 1;
  bool training_ = true;
  bool distributed_ = false;
};

// Collects the tensors of a value: a tensor, or a struct with `void visit_tensors(F)` that passes each tensor member.
template <class T>
void collect_tensors(T& value, TensorRefs& out) {
  if constexpr (std::is_same_v<std::remove_const_t<T>, at::Tensor>) {
    out.push_back(const_cast<at::Tensor*>(&value));
  } else if constexpr (requires { value.visit_tensors([](at::Tensor&) {}); }) {
    value.visit_tensors([&out](at::Tensor& tensor) { out.push_back(&tensor); });
  }
}

// These two functions collect ForwardCall's tensors and numbers from an argument whose tensors are not passed to hooks.
// The argument is a struct with `void visit_read_tensors(F)` and `std::optional<std::vector<int64_t>> read_numbers()
// const`; other arguments add nothing.
template <class T>
void collect_read_tensors(T& value, TensorRefs& out) {
  if constexpr (requires { value.visit_read_tensors([](at::Tensor&) {}); }) {
    value.visit_read_tensors([&out](at::Tensor& tensor) { out.push_back(&tensor); });
  }
}
template <class T>
void collect_read_numbers(const T& value, std::optional<std::vector<int64_t>>& out) {
  if constexpr (requires { value.read_numbers(); }) {
    const auto numbers = value.read_numbers();
    if (!numbers) out.reset();
    if (out) out->insert(out->end(), numbers->begin(), numbers->end());
  }
}

// Gives a module its call operator, which runs hooks around Self::forward. If there are hooks, the arguments are copied
// first (at::Tensor handles, not data), so that hooks never replace the caller's tensors. Without hooks, forward is
// called directly.
template <class Self>
class Callable : public Module {
 public:
  template <class... Args>
  auto operator()(Args&&... args) {
    auto& self = static_cast<Self&>(*this);
    if (!has_hooks()) return self.forward(std::forward<Args>(args)...);
    std::tuple<std::decay_t<Args>...> copies(std::forward<Args>(args)...);
    TensorRefs inputs;
    std::apply([&](auto&... each) { (collect_tensors(each, inputs), ...); }, copies);
    run_pre_hooks(inputs);
    auto result = replayed_forward(self, copies, inputs);
    TensorRefs outputs;
    collect_tensors(result, outputs);
    run_post_hooks(inputs, outputs);
    return result;
  }

 private:
  template <class Arguments>
  static TensorRefs tensors_of(Arguments& arguments) {
    TensorRefs refs;
    std::apply([&](auto&... each) { (collect_tensors(each, refs), ...); }, arguments);
    std::apply([&](auto&... each) { (collect_read_tensors(each, refs), ...); }, arguments);
    return refs;
  }

  // Returns a function that gets tensors, puts them into a copy of `arguments` in place of the tensors there, runs
  // `call` on this copy and returns the output tensors.
  template <class Arguments, class Call>
  static ForwardFunction rerun_of(const Arguments& arguments, Call call) {
    return [call, kept = arguments](const std::vector<at::Tensor>& tensors) {
      Arguments again = kept;
      const TensorRefs refs = tensors_of(again);
      for (size_t i = 0; i < tensors.size(); ++i) *refs[i] = tensors[i];
      auto result = call(again);
      TensorRefs outputs;
      collect_tensors(result, outputs);
      std::vector<at::Tensor> values;
      for (const auto* output : outputs) values.push_back(*output);
      return values;
    };
  }

  template <class Arguments>
  auto replayed_forward(Self& self, Arguments& arguments, const TensorRefs& inputs) {
    using Result = decltype(wrapped_forward(self, arguments, inputs));
    if constexpr (std::is_same_v<Result, at::Tensor>) {
      if (forward_replay() && c10::GradMode::is_enabled()) {
        ForwardCall call{.tensors = tensors_of(arguments), .numbers = std::vector<int64_t>(), .run = {}};
        std::apply([&](const auto&... each) { (collect_read_numbers(each, call.numbers), ...); }, arguments);
        call.run = rerun_of(arguments,
                            [this, &self](Arguments& with) { return wrapped_forward(self, with, tensors_of(with)); });
        if (auto replayed = forward_replay()(self, call)) return *std::move(replayed);
      }
    }
    return wrapped_forward(self, arguments, inputs);
  }

  template <class Arguments>
  auto wrapped_forward(Self& self, Arguments& arguments, const TensorRefs& inputs) {
    const auto call = [&self](Arguments& with) {
      return std::apply([&](auto&... each) { return self.forward(each...); }, with);
    };
    if (!forward_wrapper() || !c10::GradMode::is_enabled()) return call(arguments);
    ForwardFunction rerun = rerun_of(arguments, call);
    const auto wrap_outputs = forward_wrapper()(self);
    auto result = [&] {
      const c10::NoGradGuard no_grad;
      return call(arguments);
    }();
    TensorRefs outputs;
    collect_tensors(result, outputs);
    wrap_outputs(inputs, outputs, std::move(rerun));
    return result;
  }
};

}  // namespace tessera::nn
