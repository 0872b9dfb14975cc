#include "tests/conformance/programs/catalog.h"

#include <numeric>

namespace tessera::testing {

const std::vector<Family>& catalog() {
  static const std::vector<Family> all = [] {
    std::vector<Family> families;
    for (auto part : {pointwise_families(), view_families(), reduction_families(), product_families(), index_families(),
                      write_families()}) {
      for (auto& family : part) families.push_back(std::move(family));
    }
    families.push_back({"redistribute", 12, {{"redistribute", [](Draw& draw) { return draw.redistribute(); }}}});
    return families;
  }();
  return all;
}

const std::vector<Family>& catalog_with_kernels() {
  static const std::vector<Family> all = [] {
    auto families = catalog();
    for (auto part : {kernel_families(), class_families()}) {
      for (auto& family : part) families.push_back(std::move(family));
    }
    return families;
  }();
  return all;
}

Drawn draw_program(uint64_t seed, const std::vector<int64_t>& mesh) {
  Draw draw(seed, mesh);
  const auto& families = seed % 8 == 5 ? catalog_with_kernels() : catalog();
  const int total = std::accumulate(families.begin(), families.end(), 0,
                                    [](int sum, const Family& family) { return sum + family.weight; });
  const auto wanted = static_cast<int>(draw.between(4, 20));
  for (int attempt = 0; attempt < 12 * wanted && draw.program().calls() < wanted; ++attempt) {
    int64_t left = draw.below(total);
    const Family* family = families.data();
    while (left >= family->weight) {
      left -= family->weight;
      ++family;
    }
    try {
      draw.one_of(family->rows).draw(draw);
    } catch (const NothingFits&) {
    }
  }
  auto [program, plain] = draw.finish();
  return {std::move(program), std::move(plain), draw.backward_note()};
}

}  // namespace tessera::testing
