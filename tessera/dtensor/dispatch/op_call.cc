// OpInfo: what the schema says about an operation. OpCall: one call of the operation, as sharding rules receive it.
#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/dispatch/plan.h"

namespace tessera {

namespace {

uint64_t next_op_id() {
  static std::atomic<uint64_t> counter{0};
  return ++counter;
}

}  // namespace

bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  if (type.kind() == c10::TypeKind::ListType || type.kind() == c10::TypeKind::OptionalType) {
    return holds_tensors(*type.containedType(0));
  }
  return false;
}

// Reads the alias annotations of the schema. A return with a write annotation, such as Tensor(a!), is the argument with
// the same alias set. A return with an annotation without a write, such as Tensor(a), is a view of the argument that
// has an annotation without a write.
OpInfo::OpInfo(const c10::OperatorHandle& op) : handle(op), name(toString(op.operator_name())), id(next_op_id()) {
  const auto& schema = op.schema();
  for (const auto& argument : schema.arguments()) {
    ArgInfo info{argument.name(), holds_tensors(*argument.type()),
                 argument.alias_info() != nullptr && argument.alias_info()->isWrite(), argument.is_out()};
    if (info.is_tensor_or_list) {
      tensor_args.push_back(static_cast<int>(args.size()));
      writes_argument = writes_argument || info.is_written;
    }
    args.push_back(std::move(info));
  }
  for (const auto& returned : schema.returns()) {
    int alias = -1;
    const auto* viewed = returned.alias_info();
    for (const int arg : tensor_args) {
      const auto* info = schema.arguments()[arg].alias_info();
      if (viewed != nullptr && !viewed->isWrite() && info != nullptr && !info->isWrite()) view_of = arg;
    }
    if (returned.alias_info() != nullptr && returned.alias_info()->isWrite()) {
      for (size_t i = 0; i < args.size(); ++i) {
        const auto* info = schema.arguments()[i].alias_info();
        if (info != nullptr && info->beforeSets() == returned.alias_info()->beforeSets()) alias = static_cast<int>(i);
      }
    }
    return_alias.push_back(alias);
  }
  // The schemas of batch norm do not declare that training writes the running statistics.
  if (name.starts_with("aten::native_batch_norm") || name.starts_with("aten::cudnn_batch_norm") ||
      name.starts_with("aten::miopen_batch_norm")) {
    write_flag_arg = -1;
    for (size_t i = 0; i < args.size() && name.find("backward") == std::string::npos; ++i) {
      write_flag_arg = args[i].name == "training" ? static_cast<int>(i) : write_flag_arg;
      args[i].is_written = args[i].is_written || args[i].name.starts_with("running_");
      writes_argument = writes_argument || args[i].is_written;
    }
  }
  is_in_place_view = op.hasTag(at::Tag::inplace_view);
}

int OpInfo::arg_named(const char* argument) const {
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].name == argument) return static_cast<int>(i);
  }
  return -1;
}

const std::string& OpCall::name() const { return op.name; }

int OpCall::input_at(int arg) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].arg == arg) return static_cast<int>(i);
  }
  return -1;
}

int OpCall::arg_named(const char* argument) const { return op.arg_named(argument); }

std::vector<int64_t> OpCall::ints_at(int arg) const {
  if (!has(arg)) return {};
  return args[arg].isInt() ? std::vector<int64_t>{args[arg].toInt()} : args[arg].toIntVector();
}

std::string OpCall::describe() const {
  std::string text = op.name + "(";
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& input = inputs[i];
    text += fmt::format("{}{}{}: [{}] {}", i == 0 ? "" : ", ", op.args[input.arg].name,
                        input.element < 0 ? "" : fmt::format("[{}]", input.element), fmt::join(input.sizes, ", "),
                        to_string(input.placements));
    if (i == 7 && inputs.size() > 9) {
      text += fmt::format(", and {} more", inputs.size() - 8);
      break;
    }
  }
  return text + ")";
}

}  // namespace tessera
