#include "tessera/base/error.h"
#include "tessera/parallel/tensor_parallel/detail/layouts.h"
#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera {

using namespace detail;

namespace {

std::string layouts_text(const Layouts& layouts) {
  std::string text;
  for (const auto& layout : layouts) text += (text.empty() ? "" : ", ") + (layout ? to_string(*layout) : "none");
  return "(" + text + ")";
}

void check_lengths(const Layouts& given, const Layouts& desired, const char* name) {
  TESSERA_CHECK(given.size() == desired.size(), ErrorKind::kConfig,
                "[parallel.style] {0}_layouts and desired_{0}_layouts should have same length! Found {1} and {2}.",
                name, given.size(), desired.size());
}

struct Preparation {
  MeshPtr mesh;
  std::string path;
  const char* what;  // "inputs", "outputs"
  const char* name;  // "input", "output"
  Layouts given, desired;
  bool local;
  bool leave_others;

  void operator()(nn::TensorRefs& tensors) const {
    TESSERA_CHECK(tensors.size() == given.size() || (leave_others && tensors.size() > given.size()), ErrorKind::kShape,
                  "[parallel.style] {}: module {} and {}_layouts should have same length! Found {} tensors, wanted {}.",
                  path, what, name, tensors.size(), given.size());
    for (size_t i = 0; i < given.size(); ++i) {
      at::Tensor& tensor = *tensors[i];
      if (!given[i] || !tensor.defined()) continue;
      if (!is_dtensor(tensor)) tensor = as_dtensor(tensor, mesh, *given[i]);
      if (desired[i]) tensor = laid_out(tensor, *desired[i]);
      if (local) tensor = to_local(tensor);
    }
  }
};

}  // namespace

PrepareModuleInput::PrepareModuleInput(PrepareModuleInputOptions options) : options_(std::move(options)) {
  check_lengths(options_.input_layouts, options_.desired_input_layouts, "input");
}

std::string PrepareModuleInput::describe() const {
  return fmt::format("PrepareModuleInput({} -> {}{})", layouts_text(options_.input_layouts),
                     layouts_text(options_.desired_input_layouts), options_.use_local_output ? ", local" : "");
}

void PrepareModuleInput::apply(nn::Module& module, const StyleContext& context) const {
  Preparation prepare{context.mesh,
                      context.path,
                      "inputs",
                      "input",
                      options_.input_layouts,
                      options_.desired_input_layouts,
                      options_.use_local_output,
                      options_.leave_others};
  module.register_forward_pre_hook(
      [prepare = std::move(prepare)](nn::Module&, nn::TensorRefs& inputs) { prepare(inputs); });
}

PrepareModuleOutput::PrepareModuleOutput(PrepareModuleOutputOptions options) : options_(std::move(options)) {
  check_lengths(options_.output_layouts, options_.desired_output_layouts, "output");
}

std::string PrepareModuleOutput::describe() const {
  return fmt::format("PrepareModuleOutput({} -> {}{})", layouts_text(options_.output_layouts),
                     layouts_text(options_.desired_output_layouts), options_.use_local_output ? ", local" : "");
}

void PrepareModuleOutput::apply(nn::Module& module, const StyleContext& context) const {
  Preparation prepare{context.mesh,
                      context.path,
                      "outputs",
                      "output",
                      options_.output_layouts,
                      options_.desired_output_layouts,
                      options_.use_local_output,
                      /*leave_others=*/false};
  module.register_forward_hook(
      [prepare = std::move(prepare)](nn::Module&, nn::TensorRefs& outputs) { prepare(outputs); });
}

PrepareModuleInputOutput::PrepareModuleInputOutput(PrepareModuleInputOptions input, PrepareModuleOutputOptions output)
    : input_(std::move(input)), output_(std::move(output)) {}

std::string PrepareModuleInputOutput::describe() const { return input_.describe() + " and " + output_.describe(); }

void PrepareModuleInputOutput::apply(nn::Module& module, const StyleContext& context) const {
  input_.apply(module, context);
  output_.apply(module, context);
}

}  // namespace tessera
