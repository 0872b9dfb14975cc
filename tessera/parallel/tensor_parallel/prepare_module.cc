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

void check_lengths(const Layouts& declared, const Layouts& desired, const char* name) {
  TESSERA_CHECK(declared.size() == desired.size(), ErrorKind::kConfig,
                "[parallel.style] {0}_layouts and desired_{0}_layouts should have same length! Found {1} and {2}.",
                name, declared.size(), desired.size());
}

// The hook of PrepareModuleInput and PrepareModuleOutput.
struct LayoutHook {
  MeshPtr mesh;
  std::string path;
  const char* name;  // "input", "output"
  Layouts declared, desired;
  bool local;
  bool leave_others = false;

  void operator()(nn::Module&, nn::TensorRefs& tensors) const {
    TESSERA_CHECK(
        tensors.size() == declared.size() || (leave_others && tensors.size() > declared.size()), ErrorKind::kShape,
        "[parallel.style] {0}: module {1}s and {1}_layouts should have same length! Found {2} tensors, wanted {3}.",
        path, name, tensors.size(), declared.size());
    for (size_t i = 0; i < declared.size(); ++i) {
      at::Tensor& tensor = *tensors[i];
      if (!declared[i] || !tensor.defined()) continue;
      if (!is_dtensor(tensor)) tensor = as_dtensor(tensor, mesh, *declared[i]);
      if (desired[i]) tensor = redistribute_to(tensor, *desired[i]);
      if (local) tensor = to_local(tensor);
    }
  }
};

std::string describe_layout_hook(const char* style, const Layouts& declared, const Layouts& desired, bool local) {
  return fmt::format("{}({} -> {}{})", style, layouts_text(declared), layouts_text(desired), local ? ", local" : "");
}

}  // namespace

PrepareModuleInput::PrepareModuleInput(PrepareModuleInputOptions options) : options_(std::move(options)) {
  check_lengths(options_.input_layouts, options_.desired_input_layouts, "input");
}

std::string PrepareModuleInput::describe() const {
  return describe_layout_hook("PrepareModuleInput", options_.input_layouts, options_.desired_input_layouts,
                              options_.use_local_output);
}

void PrepareModuleInput::apply(nn::Module& module, const StyleContext& context) const {
  module.register_forward_pre_hook(LayoutHook{context.mesh, context.path, "input", options_.input_layouts,
                                              options_.desired_input_layouts, options_.use_local_output,
                                              options_.leave_others});
}

PrepareModuleOutput::PrepareModuleOutput(PrepareModuleOutputOptions options) : options_(std::move(options)) {
  check_lengths(options_.output_layouts, options_.desired_output_layouts, "output");
}

std::string PrepareModuleOutput::describe() const {
  return describe_layout_hook("PrepareModuleOutput", options_.output_layouts, options_.desired_output_layouts,
                              options_.use_local_output);
}

void PrepareModuleOutput::apply(nn::Module& module, const StyleContext& context) const {
  module.register_forward_hook(LayoutHook{context.mesh, context.path, "output", options_.output_layouts,
                                          options_.desired_output_layouts, options_.use_local_output});
}

PrepareModuleInputOutput::PrepareModuleInputOutput(PrepareModuleInputOptions input, PrepareModuleOutputOptions output)
    : input_(std::move(input)), output_(std::move(output)) {}

std::string PrepareModuleInputOutput::describe() const { return input_.describe() + " and " + output_.describe(); }

void PrepareModuleInputOutput::apply(nn::Module& module, const StyleContext& context) const {
  input_.apply(module, context);
  output_.apply(module, context);
}

}  // namespace tessera
