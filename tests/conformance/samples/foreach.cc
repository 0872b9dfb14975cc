// Samples for operations on lists of tensors, and for the fused optimizers.
#include "tests/conformance/samples/pointwise.h"

namespace tessera::testing {

namespace {

bool is_tensor_list(const c10::Type& type) {
  return type.kind() == c10::TypeKind::ListType && type.containedType(0)->kind() == c10::TypeKind::TensorType;
}

bool is_number_list(const c10::Type& type) {
  return type.kind() == c10::TypeKind::ListType && type.containedType(0)->kind() == c10::TypeKind::NumberType;
}

// Each list has two tensors of different shapes.
void make_foreach(SampleMaker& make) {
  const std::string base = pointwise_base(make.schema().name());
  NamedArguments arguments;
  for (const auto& argument : make.schema().arguments()) {
    const auto& type = *argument.type();
    if (argument.is_out()) continue;
    if (is_tensor_list(type)) {
      const bool divisor = base == "addcdiv" && argument.name() == "tensor2";
      const std::string domain = divisor ? "div" : base;
      arguments.emplace_back(argument.name(),
                             Tensors{pointwise_operand(make, domain, argument.name(), {make.n, make.m}),
                                     pointwise_operand(make, domain, argument.name(), {make.n})});
    } else if (is_number_list(type)) {
      arguments.emplace_back(argument.name(), std::vector<c10::Scalar>{0.75, 2.0});
    } else if (type.kind() == c10::TypeKind::TensorType) {
      const bool one_each = base.starts_with("addc");
      arguments.emplace_back(argument.name(),
                             one_each ? at::tensor({0.5, 2.0}, at::kDouble) : at::scalar_tensor(1.5, at::kDouble));
    } else if (type.kind() == c10::TypeKind::NumberType && !argument.default_value()) {
      arguments.emplace_back(argument.name(), pointwise_number(base, argument.name()));
    }
  }
  Sample& sample = make.add(arguments);
  sample.whole = {"scalars"};
}

void make_fused_adam(SampleMaker& make) {
  const auto list = [&](double low, double high) {
    return Tensors{make.uniform(low, high, {make.n, make.m}), make.uniform(low, high, {make.m})};
  };
  const Tensors steps{at::scalar_tensor(3.0, at::kFloat), at::scalar_tensor(3.0, at::kFloat)};
  const bool tensor_rate = make.overload().starts_with("tensor_lr");
  Sample& sample = make.add({{"self", list(-1, 1)},
                             {"grads", list(-1, 1)},
                             {"exp_avgs", list(-1, 1)},
                             {"exp_avg_sqs", list(0, 1)},
                             {"max_exp_avg_sqs", Tensors{}},
                             {"state_steps", steps},
                             {"lr", tensor_rate ? c10::IValue(at::scalar_tensor(0.1, at::kDouble)) : c10::IValue(0.1)},
                             {"beta1", 0.9},
                             {"beta2", 0.99},
                             {"weight_decay", 0.01},
                             {"eps", 1e-8},
                             {"amsgrad", false},
                             {"maximize", false}});
  sample.whole = {"state_steps", "lr"};
  sample.gradient = false;
  sample.may_refuse = true;
}

}  // namespace

void add_foreach_samples(SampleTable& table) {
  table.add("aten::_amp_foreach_non_finite_check_and_unscale_", [](SampleMaker& make) {
    make.add({{"self", Tensors{make.normal({make.n, make.m}), make.normal({make.m})}},
              {"found_inf", at::zeros({1}, at::kFloat)},
              {"inv_scale", at::full({1}, 0.5, at::kFloat)}})
        .whole = {"found_inf", "inv_scale"};
  });
  table.add("aten::_foreach_mm", [](SampleMaker& make) {
    make.add({{"self", Tensors{make.normal({make.n, 4}), make.normal({make.m, 4})}},
              {"mat2", Tensors{make.normal({4, make.m}), make.normal({4, make.n})}}});
  });
  table.add("aten::_foreach_norm", [](SampleMaker& make) {
    make.add({{"self", Tensors{make.normal({make.n, make.m}), make.normal({make.m})}}, {"ord", 2}});
  });
  table.add("aten::_foreach_powsum", [](SampleMaker& make) {
    make.add({{"self", Tensors{make.normal({make.n, make.m}), make.normal({make.m})}}, {"ord", 2}});
  });
  table.add("aten::_foreach_max", [](SampleMaker& make) {
    if (make.n > 0) make.add({{"self", Tensors{make.distinct({make.n, make.m}), make.distinct({make.m})}}});
  });
  table.add({"aten::_fused_adam", "aten::_fused_adam_", "aten::_fused_adamw", "aten::_fused_adamw_"}, make_fused_adam);
  for (const auto& op : listed_ops()) {
    if (op.group == "foreach" && !table.contains(op.name)) table.add(op.name, make_foreach);
  }
}

}  // namespace tessera::testing
