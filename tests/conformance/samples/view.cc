// Samples for views: the same elements in another shape.
#include "tests/conformance/samples.h"

namespace tessera::testing {

namespace {

using Ints = std::vector<int64_t>;

at::Tensor cube(SampleMaker& make) { return make.normal({make.n, 4, make.m}); }

void shape_changes(SampleMaker& make, const char* size) {
  make.add({{"self", cube(make)}, {size, Ints{make.n * 4, make.m}}});
  make.add({{"self", cube(make)}, {size, Ints{make.n, 4 * make.m}}});
  make.add({{"self", cube(make)}, {size, Ints{make.n, 2, 2, make.m}}});
  make.add({{"self", cube(make)}, {size, Ints{1, make.n, 1, 4, make.m}}});
  if (make.n > 0) make.add({{"self", cube(make)}, {size, Ints{-1}}});
}

void just_self(SampleMaker& make) { make.add({{"self", make.normal({make.n, make.m})}}); }

void squeezes(SampleMaker& make) {
  make.add({{"self", make.normal({make.n, 1, make.m})}});
  make.add({{"self", make.normal({1, make.n, 1})}});
}

void expands(SampleMaker& make) {
  make.add({{"self", make.normal({make.n, 1})}, {"size", Ints{make.n, make.m}}});
  make.add({{"self", make.normal({make.n, make.m})}, {"size", Ints{3, -1, -1}}});
}

void diagonals(SampleMaker& make) {
  make.add({{"self", make.normal({make.n, make.m, 4})}, {"offset", 0}, {"dim1", 1}, {"dim2", 2}});
  make.add({{"self", make.normal({make.n, make.m, 4})}, {"offset", 1}, {"dim1", 0}, {"dim2", -1}});
}

void splits(SampleMaker& make) {
  if (make.has("split_sizes")) {
    make.add({{"self", cube(make)}, {"split_sizes", Ints{1, 3}}, {"dim", 1}});
    if (make.n > 0) make.add({{"self", cube(make)}, {"split_sizes", Ints{1, make.n - 1}}, {"dim", 0}});
  } else {
    make.add({{"self", cube(make)}, {"split_size", 2}, {"dim", 0}});
    make.add({{"self", cube(make)}, {"split_size", 2}, {"dim", -1}});
  }
}

void add_selections(SampleTable& table) {
  table.add("aten::select", [](SampleMaker& make) {
    make.add({{"self", cube(make)}, {"dim", 1}, {"index", 2}});
    if (make.n > 0) make.add({{"self", cube(make)}, {"dim", 0}, {"index", -1}});
  });
  table.add("aten::slice", [](SampleMaker& make) {
    make.add({{"self", cube(make)}, {"dim", 0}, {"start", 1}, {"end", 3}});
    make.add({{"self", cube(make)}, {"dim", 2}, {"start", 0}, {"end", make.m}, {"step", 2}});
    make.add({{"self", cube(make)}, {"dim", 1}});
  });
  table.add({"aten::split", "aten::split_with_sizes", "aten::split_with_sizes_copy"}, splits);
  table.add("aten::unbind", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, 3})}, {"dim", 1}});
    if (make.n > 0) make.add({{"self", make.normal({make.n, 3})}, {"dim", 0}});
  });
  table.add("aten::as_strided", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"size", Ints{make.n, make.m}}, {"stride", Ints{make.m, 1}}});
  });
}

}  // namespace

void add_view_samples(SampleTable& table) {
  table.add({"aten::view", "aten::_unsafe_view", "aten::view_copy"},
            [](SampleMaker& make) { shape_changes(make, "size"); });
  table.add("aten::reshape", [](SampleMaker& make) { shape_changes(make, "shape"); });
  table.add("aten::view.dtype", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"dtype", at::kLong}});
  });
  table.add("aten::view_as_real", [](SampleMaker& make) { make.add({{"self", make.complex({make.n, make.m})}}); });
  table.add("aten::view_as_complex", [](SampleMaker& make) { make.add({{"self", make.normal({make.n, make.m, 2})}}); });
  table.add({"aten::alias", "aten::detach", "aten::t"}, just_self);
  table.add({"aten::squeeze"}, squeezes);
  table.add({"aten::squeeze.dim", "aten::squeeze.dims"}, [](SampleMaker& make) {
    const bool one = make.overload() == "dim";
    make.add({{"self", make.normal({make.n, 1, make.m})}, {"dim", one ? c10::IValue(1) : c10::IValue(Ints{1, 2})}});
    make.add({{"self", make.normal({1, make.n, make.m})}, {"dim", one ? c10::IValue(0) : c10::IValue(Ints{0, -1})}});
  });
  table.add("aten::unsqueeze", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"dim", 0}});
    make.add({{"self", make.normal({make.n, make.m})}, {"dim", -1}});
  });
  table.add({"aten::expand", "aten::expand_copy"}, expands);
  table.add("aten::permute", [](SampleMaker& make) { make.add({{"self", cube(make)}, {"dims", Ints{2, 0, 1}}}); });
  table.add("aten::transpose", [](SampleMaker& make) { make.add({{"self", cube(make)}, {"dim0", 0}, {"dim1", -1}}); });
  table.add("aten::repeat", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"repeats", Ints{2, 1, 1}}});
    make.add({{"self", make.normal({make.n, make.m})}, {"repeats", Ints{1, 3}}});
  });
  table.add({"aten::diagonal", "aten::diagonal_copy"}, diagonals);
  table.add("aten::diag_embed", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}});
    make.add({{"self", make.normal({make.n, make.m})}, {"offset", 1}, {"dim1", 0}, {"dim2", 2}});
  });
  table.add("aten::diag", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n})}});
    make.add({{"self", make.normal({make.n, make.m})}, {"diagonal", 1}});
  });
  add_selections(table);
}

}  // namespace tessera::testing
