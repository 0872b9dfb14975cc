// Optimizers over the parameters of a module. They update each rank's shards and do not communicate, with two
// exceptions: Muon needs whole matrices, and the blocks of 8-bit AdamW may be on several ranks. The step() of these two
// is COLLECTIVE over the meshes of the parameters that have a gradient.
//
//   auto optimizer = optim::make_adamw(*model, {.lr = 1e-4, .weight_decay = 0.1});
//   loss.backward();
//   optimizer->step();
//   optimizer->zero_grad();
//
// A parameter without a gradient keeps its values and state. Weight decay does not apply to norms, biases and other
// parameters whose slot says so (ParameterSlot::decay) or that have fewer than two dims, unless groups set it. An
// optimizer refers to the module, which must outlive it and belong to the same rank. Make the optimizer after
// fully_shard and to_empty.
//
// 16-bit parameters have about three decimal digits, so most updates are smaller than their last digit. By default
// their state is therefore float32, and the state `master` is a float32 copy of the parameter that is updated and then
// rounded into the parameter. If other code writes into the parameter, the copy takes over the new values.
//
// With stochastic_rounding there is no copy: a bfloat16 parameter is updated in float32 and rounded up or down at
// random, so that small updates count on average. The random numbers depend on seed, parameter, step and global
// element, not on the layout or on earlier draws.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::optim {

// The value of a hyperparameter; std::monostate is Python's None.
using Hyperparameter = std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<double>>;
using Hyperparameters = std::vector<std::pair<std::string, Hyperparameter>>;

// Options of a parameter group. Its lr is lr_factor times the optimizer's lr.
struct ParameterGroup {
  std::vector<std::string> names;  // FQNs as in Module::named_parameters
  double lr_factor = 1;
  double weight_decay = 0;
  Hyperparameters settings = {};  // replace the optimizer's settings of the same name ("betas")
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  std::vector<ParameterGroup> groups = {};  // other parameters: weight_decay, or 0 without ParameterSlot::decay
  bool master_weights = true;               // false: 16-bit parameters have 16-bit state and updates
  bool stochastic_rounding = false;         // bfloat16 only, with master_weights = false: state and updates in float32
  uint64_t seed = 0;                        // of the stochastic rounding
};

// Options of 8-bit AdamW: both moments of a parameter are stored in 8 bits, with one scale per block of 256 elements.
struct AdamW8bitOptions : AdamWOptions {};

// Options of Muon for the matrices of hidden layers and AdamW for all other parameters.
struct MuonOptions {
  double lr = 1e-3;
  double weight_decay = 0.1;
  double momentum = 0.95;
  bool nesterov = true;
  std::vector<double> ns_coefficients = {3.4445, -4.7750, 2.0315};
  double eps = 1e-7;
  int64_t ns_steps = 5;
  // The adjusted lr of a matrix. "original": lr * sqrt(max(1, rows / columns)). "match_rms_adamw": lr * 0.2
  // sqrt(max(rows, columns)), with which AdamW's values of lr and weight decay also suit Muon.
  std::string adjust_lr_fn = "original";
  AdamWOptions adamw = {};  // betas and eps of the other parameters; its lr, decay, groups and precision are unused
  std::vector<ParameterGroup> groups = {};
  bool master_weights = true;  // as in AdamWOptions
  bool stochastic_rounding = false;
  uint64_t seed = 0;
};

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;  // added to the gradient
  bool nesterov = false;
  std::vector<ParameterGroup> groups = {};
  bool master_weights = true;  // as in AdamWOptions
  bool stochastic_rounding = false;
  uint64_t seed = 0;
};

// A group in the form of torch.optim's param_groups: its settings under PyTorch's names ("lr", "betas", "eps", ...) and
// the FQNs of its parameters.
struct ParamGroup {
  Hyperparameters hyperparameters;
  std::vector<std::string> params;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Updates all parameters that have a gradient. Error kShape where a gradient's placements differ from its
  // parameter's.
  //
  // found_inf (made by found_inf.h): a float32 scalar on the parameters' device. Where it is 1, parameters and states
  // stay unchanged, except for updates that step_early() has made. The host does not wait for its value, so steps()
  // counts the step in any case. Error kConfig for an optimizer without takes_found_inf().
  void step(const at::Tensor& found_inf = {});
  // Whether step() accepts found_inf. True only for AdamW without stochastic rounding, because its kernel reads
  // found_inf on the device.
  bool takes_found_inf() const { return kernel_takes_found_inf() && !precision_.stochastic_rounding; }
  // Updates those of `parameters` that have a gradient, before the step() that ends the current step. The result is
  // bitwise that of a single step(). The caller may then free these gradients before the other gradients exist. Errors
  // as step(); kConfig for optimizers that communicate (Muon, 8-bit AdamW); kInternal for a parameter that was already
  // updated in this step.
  void step_early(const std::vector<at::Tensor>& parameters);
  void zero_grad();        // sets all gradients to undefined
  void set_lr(double lr);  // the lr of each group becomes lr * lr_factor
  double lr() const { return lr_; }
  // The number of step() calls, for learning-rate schedules; set_step() sets it when a run is resumed. The number of
  // updates of each parameter is the entry "step" of state().
  int64_t steps() const { return steps_; }
  void set_step(int64_t steps) { steps_ = steps; }

  // The state of one parameter, for checkpoints: tensors with the parameter's shape and placements (DTensors where the
  // parameter is one), the scalar "step", and states that every rank holds whole (scales). The tensors share the
  // optimizer's memory: writing into them, or into their local parts, loads the state.
  std::map<std::string, at::Tensor> state(const std::string& parameter) const;
  std::vector<std::string> parameter_names() const;
  const nn::ParameterSlot& slot(const std::string& parameter) const;
  // Returns whether the parameter has a float32 copy, the state `master`.
  bool has_master(const std::string& parameter) const;
  // Resets the state of a parameter to its values before the first step: zeros, step 0, `master` equal to the
  // parameter. A frozen parameter without a state gets none, unless even_frozen is true. States named in `except` keep
  // their values. The tensors that state() returned stay valid.
  void reset_state(const std::string& parameter, bool even_frozen = false, const std::set<std::string>& except = {});

  // Returns the groups given in the options, then one group per default weight decay for the remaining parameters. Each
  // parameter, frozen ones included, is in one group. Where an optimizer has two kinds of updates (Muon: use_muon;
  // 8-bit AdamW: optim_bits), a group with parameters of both kinds is split into two.
  std::vector<ParamGroup> param_groups() const;
  // Sets hyperparameters from one list per group. A setting that a list lacks keeps its value; a setting that this
  // optimizer does not use is stored for other code (initial_lr). lr() becomes the lr of the first list that has one,
  // divided by the lr_factor of its group. A group whose list has no lr gets lr() times its lr_factor. States that the
  // new settings do not need are dropped. Error kConfig, before anything changes: another number of groups, values out
  // of range or of another type, maximize, amsgrad, another use_muon or optim_bits.
  void set_hyperparameters(const std::vector<Hyperparameters>& groups);
  // Throws the errors that set_hyperparameters(groups) would throw, and changes nothing. Returns for each group the
  // names of the states that its parameters would have after set_hyperparameters(groups), without master and step.
  std::vector<std::vector<std::string>> check_hyperparameters(const std::vector<Hyperparameters>& groups) const;

 protected:
  struct SettingsGroup {
    double lr = 0;
    double lr_factor = 1;
    Hyperparameters settings;              // all settings but lr
    std::vector<std::string> state_names;  // states that apply() needs, without master
    std::vector<size_t> entries;
  };
  struct ParameterEntry {
    std::string name;
    nn::ParameterSlot* slot = nullptr;
    at::Tensor parameter;  // the slot's parameter when the optimizer was made
    at::Tensor local;
    size_t group = 0;
    std::map<std::string, at::Tensor> state;  // local parts
    at::Tensor step;                          // state "step": float32 scalar on the parameter's device
    int64_t steps = 0;                        // value of `step` at version steps_version
    uint64_t steps_version = 0;
    uint64_t rounded_version = 0;  // version of the parameter when its master was rounded into it
    bool updated = false;          // already updated in this step
  };
  // One update: the tensor to change (the parameter or its master) and the gradient of this step. Both are local
  // tensors of the same dtype.
  struct ParameterUpdate {
    ParameterEntry* entry;
    at::Tensor value;
    at::Tensor gradient;
  };

  struct Precision {
    bool master_weights = true;
    bool stochastic_rounding = false;
    uint64_t seed = 0;
  };
  // How an optimizer divides the parameters into kinds. It updates each kind in another way (Muon updates matrices by
  // Muon and other parameters by AdamW).
  struct UpdateKinds {
    std::function<size_t(const nn::NamedParameter&)> kind_of;  // null: all parameters are of kind 0
    std::string setting;                                       // the setting whose value shows a group's kind
  };
  // `kinds` has one entry for each kind of UpdateKinds: the default settings, besides lr, of a group of this kind, in
  // PyTorch's order.
  Optimizer(nn::Module& module, double lr, const std::vector<Hyperparameters>& kinds,
            const std::vector<ParameterGroup>& groups, const Precision& precision, const UpdateKinds& choice);
  // Returns the value of the tensor `entry.step`, from a copy on the host. The host waits for the device only if the
  // copy is out of date, because other code wrote into the tensor.
  static int64_t steps_of(ParameterEntry& entry);
  // Calls check() for each group and makes the optimizer state that the settings of the group need. The constructor of
  // a derived class must call set_up_groups() last.
  void set_up_groups(const char* verb);
  // Updates `value` of each element of `updates`. All these tensors have one dtype, one device and one parameter group,
  // whose settings are `group`. The `step` of each entry already counts this update.
  virtual void apply(const std::vector<ParameterUpdate>& updates, const SettingsGroup& group) = 0;
  // Checks the settings of a parameter group: raises Error kConfig for settings that apply() does not support. `verb`
  // names the caller in the message.
  virtual void check(const Hyperparameters& settings, const char* verb) const = 0;
  virtual std::vector<std::string> state_names(const Hyperparameters& settings) const = 0;
  virtual bool communicates() const { return false; }  // whether apply() communicates
  virtual bool kernel_takes_found_inf() const { return false; }
  const at::Tensor& found_inf() const { return found_inf_; }  // of the current step; undefined: none

 private:
  void make_groups(const std::vector<Hyperparameters>& kinds, const std::vector<size_t>& kind_of_entry,
                   const std::vector<ParameterGroup>& groups);
  static void reset_step(ParameterEntry& entry);  // sets the step count to 0
  void make_state(ParameterEntry& entry) const;   // makes missing states; their step count restarts
  std::vector<SettingsGroup> changed_groups(const std::vector<Hyperparameters>& groups) const;
  double fitted_lr(const std::vector<SettingsGroup>& groups, const std::vector<bool>& has_lr) const;
  void fit_state_to_settings();
  void refresh_master(ParameterEntry& entry);
  void count_step(const std::vector<ParameterEntry*>& entries) const;
  void update_in_float32(const std::vector<ParameterEntry*>& entries);
  void update(const std::vector<ParameterEntry*>& entries);  // entries that have a gradient
  const ParameterEntry& entry_of(const std::string& parameter, const char* verb) const;
  double lr_;
  Precision precision_;
  std::string kind_setting_;
  std::vector<SettingsGroup> groups_;
  int64_t steps_ = 0;
  at::Tensor found_inf_;
  std::vector<ParameterEntry> entries_;
  std::unordered_map<std::string, size_t> position_;  // FQN to index in entries_
};

// Adam with decoupled weight decay, with the updates of torch.optim.AdamW. States: exp_avg, exp_avg_sq. Error kConfig
// for settings out of range, groups that name an unknown parameter or a parameter twice, stochastic rounding together
// with master weights, and stochastic rounding of float16.
std::unique_ptr<Optimizer> make_adamw(nn::Module& module, const AdamWOptions& options);
// AdamW with 8-bit moments, with the updates of torchao's AdamW8bit. Parameters whose number of elements is at least
// 4096 and a multiple of 256 have the states exp_avg_codes, exp_avg_scale, exp_avg_sq_codes and exp_avg_sq_scale: 8-bit
// codes of bitsandbytes' dynamic map, and a float32 scale for each block of 256 elements of the whole flattened
// parameter. The results therefore do not depend on the layout. Other parameters have AdamW's states. Error kConfig as
// make_adamw, and for such parameters on an accelerator.
std::unique_ptr<Optimizer> make_adamw8bit(nn::Module& module, const AdamW8bitOptions& options);
// Muon with the updates of torch.optim.Muon (state momentum_buffer) for two-dimensional parameters that are no
// embedding or head, and AdamW for the others. Each matrix is all-gathered; one rank of its mesh computes its update
// and broadcasts it to the others. The results do not depend on the layout.
std::unique_ptr<Optimizer> make_muon(nn::Module& module, const MuonOptions& options);
// SGD with the updates of torch.optim.SGD. Parameters have the state momentum_buffer where momentum is above 0.
std::unique_ptr<Optimizer> make_sgd(nn::Module& module, const SgdOptions& options);

}  // namespace tessera::optim
