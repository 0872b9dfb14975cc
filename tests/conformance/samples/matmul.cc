// Samples for matrix products.
#include "tests/conformance/samples.h"

namespace tessera::testing {

void add_matmul_samples(SampleTable& table) {
  table.add("aten::mm", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, 2 * make.k})}, {"mat2", make.normal({2 * make.k, make.m})}});
    make.add({{"self", make.normal({2 * make.k, make.n}).t()}, {"mat2", make.normal({make.m, 2 * make.k}).t()}});
  });
  table.add("aten::bmm", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.k, make.m})}, {"mat2", make.normal({make.n, make.m, 4})}});
  });
  table.add("aten::addmm", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})},
              {"mat1", make.normal({make.n, 4})},
              {"mat2", make.normal({4, make.m})},
              {"beta", 2},
              {"alpha", 3}});
    if (make.schema().name() != "aten::addmm_") {
      make.add(
          {{"self", make.normal({make.m})}, {"mat1", make.normal({make.n, 4})}, {"mat2", make.normal({4, make.m})}});
    }
  });
  table.add("aten::baddbmm", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.k, make.m})},
              {"batch1", make.normal({make.n, make.k, 4})},
              {"batch2", make.normal({make.n, 4, make.m})},
              {"beta", 2},
              {"alpha", 3}});
  });
  table.add("aten::dot", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n})}, {"tensor", make.normal({make.n})}});
  });
  table.add("aten::_scaled_mm", [](SampleMaker& make) {
    if (make.n == 0) return;
    const auto eight = [](const at::Tensor& tensor) { return tensor.to(at::kFloat8_e4m3fn); };
    make.add({{"self", eight(make.normal({16 * make.n, 32}))},
              {"mat2", eight(make.normal({16, 32})).t()},
              {"scale_a", at::ones({}, at::kFloat)},
              {"scale_b", at::full({}, 0.5, at::kFloat)},
              {"out_dtype", at::kFloat}})
        .tolerance = 1e-3;
  });
  table.add("aten::_grouped_mm", [](SampleMaker& make) {
    const auto half = [](const at::Tensor& tensor) { return tensor.to(at::kBFloat16); };
    make.add({{"self", half(make.normal({make.n, 8, 16}))}, {"mat2", half(make.normal({make.n, 16, 8}))}}).tolerance =
        2e-2;
  });
}

}  // namespace tessera::testing
