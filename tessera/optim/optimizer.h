// Optimizers over the parameters of a module. They work on each rank's shards. No communication, but for Muon, which
// needs whole matrices, and 8-bit AdamW, whose blocks may lie on several ranks: their step() is COLLECTIVE over the
// meshes of the parameters that have a gradient.
//
//   auto optimizer = optim::make_adamw(*model, {.lr = 1e-4, .weight_decay = 0.1});
//   loss.backward();
//   optimizer->step();
//   optimizer->zero_grad();
//
// Parameters without a gradient are left alone, their state too. Weight decay spares norms, biases and whatever else
// says so in its slot (ParameterSlot::decay) or has fewer than two dims, unless groups say otherwise. An optimizer
// holds the module by reference and belongs to the same rank; make it after fully_shard and to_empty.
//
// Parameters of 16 bits hold about three digits: most updates are less than their last one. So their state is float32
// by default, and so is a copy of each, state `master`, which is updated and then rounded into the parameter. Where
// somebody wrote other values into the parameter, the copy follows. With stochastic_rounding there is no copy: bfloat16
// parameters are read, updated in float32 and rounded up or down at random, so that small updates count on average.
// What is drawn depends on seed, parameter, step and global element, not on the layout or on what was drawn before.
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

// The value of a hyper-parameter; monostate is Python's None.
using Hyperparameter = std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<double>>;
using Hyperparameters = std::vector<std::pair<std::string, Hyperparameter>>;

// Parameters that are treated alike. Factors are relative to the optimizer's own settings.
struct ParameterGroup {
  std::vector<std::string> names;  // as in Module::named_parameters
  double lr_factor = 1;
  double weight_decay = 0;
  Hyperparameters settings = {};  // in place of the optimizer's own, where it has one of that name ("betas")
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  std::vector<ParameterGroup> groups = {};  // parameters in none: the default rule above
  bool master_weights = true;               // false: state and updates of 16-bit parameters in 16 bits
  bool stochastic_rounding = false;         // beside master_weights = false, of bfloat16: state and updates in float32
  uint64_t seed = 0;                        // of the rounding
};

// 8-bit AdamW: both moments of a parameter in 8 bits, with a scale for each block of 256 elements.
struct AdamW8bitOptions : AdamWOptions {};

// Muon for the matrices of hidden layers, AdamW for all else.
struct MuonOptions {
  double lr = 1e-3;
  double weight_decay = 0.1;
  double momentum = 0.95;
  bool nesterov = true;
  std::vector<double> ns_coefficients = {3.4445, -4.7750, 2.0315};
  double eps = 1e-7;
  int64_t ns_steps = 5;
  // "original": lr times sqrt(max(1, rows / columns)); "match_rms_adamw": times 0.2 sqrt(max(rows, columns)), so that
  // lr and weight decay of AdamW suit matrices, too.
  std::string adjust_lr_fn = "original";
  AdamWOptions adamw = {};  // betas and eps of the other parameters; its lr, decay, groups and precision are not read
  std::vector<ParameterGroup> groups = {};
  bool master_weights = true;  // as of AdamW
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
  bool master_weights = true;  // as above
  bool stochastic_rounding = false;
  uint64_t seed = 0;
};

// A group as torch.optim's param_groups show it: what is set, under PyTorch's names ("lr", "betas", "eps", ...), and
// the names of its parameters.
struct ParamGroup {
  Hyperparameters hyperparameters;
  std::vector<std::string> params;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Error kShape when a parameter's gradient does not lie as the parameter does. Where `found_inf`, a float32 scalar
  // where the parameters lie, is 1, the step leaves parameters and states as they were, but for what step_early() has
  // updated; the host does not wait to know, so steps() counts the step all the same. found_inf.h makes it. Error
  // kConfig where it is given to an optimizer without takes_found_inf().
  void step(const at::Tensor& found_inf = {});
  // AdamW without stochastic rounding, whose kernel can tell on the device.
  bool takes_found_inf() const { return kernel_takes_found_inf() && !precision_.stochastic_rounding; }
  // Updates those of `parameters` that have a gradient, as a part of the step that the next step() ends, with which it
  // is the same to the bit: for gradients that are to be freed before all of them are there. Errors as step(); kConfig
  // where updates need other ranks (Muon, 8-bit AdamW); kInternal for a parameter that was updated in this step.
  void step_early(const std::vector<at::Tensor>& parameters);
  void zero_grad();        // gradients become undefined
  void set_lr(double lr);  // groups keep their factors
  double lr() const { return lr_; }
  // Steps taken, for schedules; set_step is for resuming. What updates depend on is in state().
  int64_t steps() const { return steps_; }
  void set_step(int64_t steps) { steps_ = steps; }

  // State of one parameter by name, for checkpoints: tensors shaped and placed like the parameter (DTensors when it is
  // one), "step", a scalar, and what is of the whole parameter on every rank (scales). They share memory with the
  // optimizer: writing into them (or their local parts) loads it.
  std::map<std::string, at::Tensor> state(const std::string& parameter) const;
  std::vector<std::string> parameter_names() const;
  const nn::ParameterSlot& slot(const std::string& parameter) const;
  // Whether a float32 copy of the parameter is updated: its state `master`.
  bool has_master(const std::string& parameter) const;
  // As before the first step: zeros, no steps, `master` as the parameter; nothing for a frozen parameter that never had
  // a state, unless even_frozen gives it one. States named in `except` keep their values. Tensors that state() gave
  // stay its tensors.
  void reset_state(const std::string& parameter, bool even_frozen = false, const std::set<std::string>& except = {});

  // Those of the options, then one for each default weight decay of the parameters in none. Each parameter, frozen ones
  // too, is in one. Where an optimizer treats parameters in two ways (Muon: use_muon; 8-bit AdamW: optim_bits), a group
  // that has both is two.
  std::vector<ParamGroup> param_groups() const;
  // One list a group; what it does not name stays, and names that are not of this optimizer are kept for whoever asks
  // (initial_lr). lr() becomes the lr of the first list that names one, over the group's factor; groups whose list
  // names none follow it by theirs. States that the settings have no use for any more are dropped. Error kConfig,
  // before anything changes: another number of groups, settings out of range or of another type, maximize, amsgrad,
  // another use_muon or optim_bits.
  void set_hyperparameters(const std::vector<Hyperparameters>& groups);
  // Nothing but its errors; the states that parameters of each group will have then, beside master and step.
  std::vector<std::vector<std::string>> check_hyperparameters(const std::vector<Hyperparameters>& groups) const;

 protected:
  struct Group {
    double lr = 0;
    double lr_factor = 1;
    Hyperparameters settings;              // all but lr
    std::vector<std::string> state_names;  // that apply wants, without master
    std::vector<size_t> entries;
  };
  struct Entry {
    std::string name;
    nn::ParameterSlot* slot = nullptr;
    at::Tensor parameter;  // as it was when the state was made
    at::Tensor local;
    size_t group = 0;
    std::map<std::string, at::Tensor> state;  // local parts
    at::Tensor step;                          // float32 scalar beside it
    int64_t steps = 0;                        // its value when it had this version
    uint64_t steps_version = 0;
    uint64_t rounded_version = 0;  // of the parameter, when its master was rounded into it
    bool updated = false;          // updated in this step
  };
  // What is updated, the parameter or its master, and this step's gradient, both local and of one dtype.
  struct Update {
    Entry* entry;
    at::Tensor value;
    at::Tensor gradient;
  };

  struct Precision {
    bool master_weights = true;
    bool stochastic_rounding = false;
    uint64_t seed = 0;
  };
  // Which of the kinds a parameter is of; the setting whose value tells a group's kind.
  struct KindChoice {
    std::function<size_t(const nn::NamedParameter&)> kind_of;  // none: all of the first
    std::string setting;
  };
  // kinds: of each way to treat parameters, what a group has beside lr unless it says otherwise, in PyTorch's order.
  Optimizer(nn::Module& module, double lr, const std::vector<Hyperparameters>& kinds,
            const std::vector<ParameterGroup>& groups, const Precision& precision, const KindChoice& choice);
  // The value of `step`. The host waits for it where somebody wrote into it.
  static int64_t steps_of(Entry& entry);
  // check() of each group, and the state that its settings want: what constructors end with.
  void set_up_groups(const char* verb);
  // Values of `updates` share dtype, device and group; the step of each entry counts this one already.
  virtual void apply(const std::vector<Update>& updates, const Group& group) = 0;
  // Error kConfig for what apply cannot do, named with `verb`.
  virtual void check(const Hyperparameters& settings, const char* verb) const = 0;
  virtual std::vector<std::string> state_names(const Hyperparameters& settings) const = 0;
  virtual bool communicates() const { return false; }  // in apply
  virtual bool kernel_takes_found_inf() const { return false; }
  const at::Tensor& found_inf() const { return found_inf_; }  // of the step that apply is a part of; else undefined

 private:
  void make_groups(const std::vector<Hyperparameters>& kinds, const std::vector<size_t>& kind_of_entry,
                   const std::vector<ParameterGroup>& groups);
  static void restart(Entry& entry);    // no steps
  void make_state(Entry& entry) const;  // what it lacks; its next step is then its first
  std::vector<Group> changed_groups(const std::vector<Hyperparameters>& groups) const;
  double fitted_lr(const std::vector<Group>& groups, const std::vector<bool>& has_lr) const;
  void fit_state_to_settings();
  void follow_writes(Entry& entry);
  void count_step(const std::vector<Entry*>& entries) const;
  void update_in_float32(const std::vector<Entry*>& entries);
  void update(const std::vector<Entry*>& entries);  // which have a gradient
  const Entry& entry_of(const std::string& parameter, const char* verb) const;
  double lr_;
  Precision precision_;
  std::string kind_setting_;
  std::vector<Group> groups_;
  int64_t steps_ = 0;
  at::Tensor found_inf_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string, size_t> position_;  // of each name in entries_
};

// Adam with decoupled weight decay; states exp_avg and exp_avg_sq. The updates of torch.optim.AdamW. Error kConfig for
// settings out of range, groups that name unknown parameters or one twice, or stochastic rounding beside master weights
// or of float16.
std::unique_ptr<Optimizer> make_adamw(nn::Module& module, const AdamWOptions& options);
// States exp_avg_codes, exp_avg_scale, exp_avg_sq_codes and exp_avg_sq_scale of parameters with at least 4096 elements,
// a multiple of 256: 8-bit codes of bitsandbytes' dynamic map, and a float32 scale for each block of 256 elements of
// the whole parameter, flattened; so numbers do not depend on the layout. AdamW's states of others. The updates of
// torchao's AdamW8bit. Error kConfig as above, and where such parameters lie on an accelerator.
std::unique_ptr<Optimizer> make_adamw8bit(nn::Module& module, const AdamW8bitOptions& options);
// The updates of torch.optim.Muon (state momentum_buffer) for parameters of two dims that are no embedding or head;
// those of AdamW for the others. Matrices are gathered, each is computed by one rank of its mesh, and what comes out is
// sent to all: numbers do not depend on the layout.
std::unique_ptr<Optimizer> make_muon(nn::Module& module, const MuonOptions& options);
// State momentum_buffer when there is momentum. The updates of torch.optim.SGD.
std::unique_ptr<Optimizer> make_sgd(nn::Module& module, const SgdOptions& options);

}  // namespace tessera::optim
