// Samples for operations that make, copy, join and rearrange tensors.
#include "tests/conformance/samples.h"

namespace tessera::testing {

namespace {

using Ints = std::vector<int64_t>;

void just_self(SampleMaker& make) { make.add({{"self", make.normal({make.n, make.m})}}); }

void add_factories(SampleTable& table) {
  table.add({"aten::zeros_like", "aten::ones_like", "aten::clone", "aten::contiguous"}, just_self);
  table.add("aten::empty_like", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}}).undefined_values = true;
  });
  table.add("aten::full_like", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"fill_value", 2.5}});
  });
  table.add({"aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::new_empty"}, [](SampleMaker& make) {
    for (const Ints& size : {Ints{make.n, make.m}, Ints{3, make.n}}) {
      NamedArguments arguments{{"self", make.normal({make.n, make.m})}, {"size", size}};
      if (make.has("fill_value")) arguments.emplace_back("fill_value", 2.5);
      make.add(arguments).undefined_values = make.schema().name() == "aten::new_empty";
    }
  });
  table.add("aten::new_empty_strided", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"size", Ints{make.n, make.m}}, {"stride", Ints{make.m, 1}}})
        .undefined_values = true;
    make.add({{"self", make.normal({make.n, make.m})}, {"size", Ints{2, 3}}, {"stride", Ints{3, 1}}}).undefined_values =
        true;
  });
  table.add("aten::eye.m_out", [](SampleMaker& make) {
    make.add({{"n", make.n}, {"m", make.m}, {"out", at::zeros({make.n, make.m}, at::kDouble)}});
  });
  table.add("aten::copy", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"src", make.normal({make.n, make.m})}});
    make.add({{"self", make.normal({make.n, make.m})}, {"src", make.normal({make.m}).to(at::kFloat)}}).tolerance = 1e-6;
  });
  table.add("aten::fill_.Scalar", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"value", 1.5}});
  });
  table.add("aten::zero_", just_self);
  table.add("aten::_local_scalar_dense", [](SampleMaker& make) {
    make.add({{"self", make.normal({})}});
    make.add({{"self", make.normal({1})}});
  });
  table.add("aten::is_pinned", just_self);
  table.add("aten::is_same_size", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"other", make.normal({make.n, make.m})}});
    make.add({{"self", make.normal({make.n, make.m})}, {"other", make.normal({make.n, make.m + 1})}});
  });
}

}  // namespace

void add_tensor_samples(SampleTable& table) {
  add_factories(table);
  table.add("aten::cat", [](SampleMaker& make) {
    make.add({{"tensors", Tensors{make.normal({make.n, make.m}), make.normal({make.n, make.k})}}, {"dim", 1}});
    make.add({{"tensors", Tensors{make.normal({make.n, make.m}), make.normal({make.k, make.m})}}, {"dim", 0}});
  });
  table.add("aten::stack", [](SampleMaker& make) {
    make.add({{"tensors", Tensors{make.normal({make.n, make.m}), make.normal({make.n, make.m})}}, {"dim", 0}});
    make.add({{"tensors", Tensors{make.normal({make.n, make.m}), make.normal({make.n, make.m})}}, {"dim", -1}});
  });
  table.add("aten::flip", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m, make.k})}, {"dims", Ints{1}}});
    make.add({{"self", make.normal({make.n, make.m, make.k})}, {"dims", Ints{0, 2}}});
  });
  table.add("aten::roll", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"shifts", Ints{1}}, {"dims", Ints{0}}});
    make.add({{"self", make.normal({make.n, make.m})}, {"shifts", Ints{2}}});
  });
  table.add({"aten::tril", "aten::triu"}, [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"diagonal", 1}});
    make.add({{"self", make.normal({make.n, make.m, 4})}});
  });
  table.add("aten::constant_pad_nd", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"pad", Ints{1, 2}}, {"value", 0.5}});
    make.add({{"self", make.normal({make.n, make.m})}, {"pad", Ints{0, 0, 1, 0}}});
  });
  table.add("aten::bucketize", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"boundaries", at::tensor({-1.0, 0.0, 0.5, 1.0}, at::kDouble)}});
  });
}

}  // namespace tessera::testing
