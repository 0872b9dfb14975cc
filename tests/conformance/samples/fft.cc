// Samples for the Fourier transforms.
#include "tests/conformance/samples.h"

namespace tessera::testing {

// Without rows MKL refuses some of the plain operations, so there would be no reference.
void add_fft_samples(SampleTable& table) {
  table.add("aten::_fft_c2c", [](SampleMaker& make) {
    if (make.n == 0) return;
    make.add({{"self", make.complex({make.n, make.m})},
              {"dim", std::vector<int64_t>{1}},
              {"normalization", 0},
              {"forward", true}});
    make.add({{"self", make.complex({make.n, make.m, make.k})},
              {"dim", std::vector<int64_t>{0, 2}},
              {"normalization", 1},
              {"forward", false}});
  });
  table.add("aten::_fft_r2c", [](SampleMaker& make) {
    if (make.n == 0) return;
    make.add({{"self", make.normal({make.n, make.m})},
              {"dim", std::vector<int64_t>{1}},
              {"normalization", 0},
              {"onesided", true}});
  });
  table.add("aten::_fft_c2r", [](SampleMaker& make) {
    if (make.n == 0) return;
    make.add({{"self", make.complex({make.n, 4})},
              {"dim", std::vector<int64_t>{1}},
              {"normalization", 2},
              {"last_dim_size", 6}});
  });
}

}  // namespace tessera::testing
