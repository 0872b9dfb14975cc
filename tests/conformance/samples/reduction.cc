// Samples for sums, extrema, sorting and scans along dims.
#include <limits>

#include "tests/conformance/samples.h"

namespace tessera::testing {

namespace {

using Ints = std::vector<int64_t>;

void whole(SampleMaker& make) { make.add({{"self", make.normal({make.n, make.m})}}); }

void filled(SampleMaker& make) {  // not defined without elements
  if (make.n > 0) make.add({{"self", make.distinct({make.n, make.m})}});
}

void along_dims(SampleMaker& make, bool may_be_empty) {
  make.add({{"self", make.distinct({make.n, make.m, make.k})}, {"dim", Ints{1}}});
  make.add({{"self", make.distinct({make.n, make.m, make.k})}, {"dim", Ints{-1, 1}}, {"keepdim", true}});
  if (may_be_empty || make.n > 0) {
    make.add({{"self", make.distinct({make.n, make.m, make.k})}, {"dim", Ints{0}}});
    make.add({{"self", make.distinct({make.n, make.m, make.k})}, {"dim", Ints{0, 2}}, {"keepdim", true}});
  }
}

void along_dim(SampleMaker& make) {
  make.add({{"self", make.distinct({make.n, make.m})}, {"dim", -1}});
  if (make.n > 0) make.add({{"self", make.distinct({make.n, make.m})}, {"dim", 0}});
  if (make.has("keepdim")) make.add({{"self", make.distinct({make.n, make.m})}, {"dim", 1}, {"keepdim", true}});
}

void flags_along_dim(SampleMaker& make) {
  make.add({{"self", make.flags({make.n, make.m})}, {"dim", 0}});
  make.add({{"self", make.flags({make.n, make.m})}, {"dim", 1}, {"keepdim", true}});
}

void spread(SampleMaker& make) {  // var, std
  make.add({{"self", make.normal({make.n, make.m})}, {"dim", Ints{1}}, {"correction", 1}});
  make.add({{"self", make.normal({make.n, make.m})}, {"dim", Ints{1}}, {"correction", 0}, {"keepdim", true}});
  if (make.n > 1) {
    make.add({{"self", make.normal({make.n, make.m})}, {"correction", 1}});
    make.add({{"self", make.normal({make.n, make.m})}, {"dim", Ints{0}}});
  }
}

void norms(SampleMaker& make) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const double order : {2.0, 1.0, 3.0}) {
    make.add({{"self", make.uniform(0.5, 1.5, {make.n, make.m})}, {"ord", order}});
  }
  make.add({{"self", make.uniform(0.5, 1.5, {make.n, make.m})}, {"ord", 2.0}, {"dim", Ints{1}}, {"keepdim", true}});
  make.add({{"self", make.uniform(0.5, 1.5, {make.n, make.m})}, {"ord", 2.0}, {"dim", Ints{0}}});
  if (make.n > 0 && make.schema().name() == "aten::linalg_vector_norm") {
    make.add({{"self", make.distinct({make.n, make.m})}, {"ord", inf}});
    make.add({{"self", make.distinct({make.n, make.m})}, {"ord", 0.0}});
  }
}

void add_sorts(SampleTable& table) {
  table.add("aten::sort", [](SampleMaker& make) {
    for (const int64_t dim : {0, 1}) {
      NamedArguments arguments{{"self", make.distinct({make.n, make.m})}, {"dim", dim}, {"descending", dim == 1}};
      if (make.has("stable")) arguments.emplace_back("stable", true);
      make.add(arguments);
    }
  });
  table.add("aten::topk", [](SampleMaker& make) {
    make.add({{"self", make.distinct({make.n, make.m})}, {"k", 2}, {"dim", 1}});
    if (make.n > 0) make.add({{"self", make.distinct({make.n, make.m})}, {"k", 1}, {"dim", 0}, {"largest", false}});
  });
  table.add("aten::kthvalue", [](SampleMaker& make) {
    make.add({{"self", make.distinct({make.n, make.m})}, {"k", 2}, {"dim", 1}});
    if (make.n > 0) make.add({{"self", make.distinct({make.n, make.m})}, {"k", 1}, {"dim", 0}, {"keepdim", true}});
  });
  table.add("aten::histc", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"bins", 5}, {"min", -2}, {"max", 2}});
  });
  table.add("aten::bincount", [](SampleMaker& make) {
    make.add({{"self", make.integers(0, 5, {make.n})}}).gradient = false;
    make.add({{"self", make.integers(0, 5, {make.n})}, {"weights", make.normal({make.n})}, {"minlength", 7}}).gradient =
        false;
  });
  table.add("aten::equal", [](SampleMaker& make) {
    const at::Tensor x = make.integers(-9, 9, {make.n, make.m}).to(at::kDouble);  // its shares add up exactly
    make.add({{"self", x}, {"other", x.clone()}});
    make.add({{"self", x}, {"other", make.normal({make.n, make.m})}});
  });
}

}  // namespace

void add_reduction_samples(SampleTable& table) {
  table.add({"aten::sum", "aten::prod"}, whole);
  table.add({"aten::mean", "aten::max", "aten::min", "aten::median", "aten::nanmedian"}, filled);
  table.add({"aten::sum.dim_IntList"}, [](SampleMaker& make) { along_dims(make, true); });
  table.add("aten::nansum", [](SampleMaker& make) {
    whole(make);
    along_dims(make, true);
  });
  table.add({"aten::mean.dim", "aten::mean.out", "aten::amax", "aten::amin"},
            [](SampleMaker& make) { along_dims(make, false); });
  table.add({"aten::logsumexp"}, [](SampleMaker& make) { along_dims(make, false); });
  table.add({"aten::all", "aten::any"}, [](SampleMaker& make) { make.add({{"self", make.flags({make.n, make.m})}}); });
  table.add({"aten::all.dim", "aten::any.dim", "aten::any.out"}, flags_along_dim);
  table.add("aten::any.dims", [](SampleMaker& make) {
    make.add({{"self", make.flags({make.n, make.m, make.k})}, {"dim", Ints{0, 2}}});
    make.add({{"self", make.flags({make.n, make.m, make.k})}, {"dim", Ints{1}}, {"keepdim", true}});
  });
  table.add(
      {"aten::max.dim", "aten::max.dim_max", "aten::min.dim", "aten::min.dim_min", "aten::median.dim",
       "aten::median.dim_values", "aten::nanmedian.dim", "aten::nanmedian.dim_values", "aten::mode", "aten::argmax",
       "aten::argmin", "aten::cummax", "aten::cummin", "aten::prod.dim_int", "aten::prod.int_out"},
      along_dim);
  table.add({"aten::cumsum", "aten::cumprod", "aten::logcumsumexp"}, [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"dim", -1}});
    make.add({{"self", make.normal({make.n, make.m})}, {"dim", 0}});
  });
  table.add({"aten::std", "aten::var", "aten::var_mean"}, spread);
  table.add({"aten::linalg_vector_norm", "aten::linalg__powsum"}, norms);
  table.add("aten::norm.Scalar", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"p", 2}});
    make.add({{"self", make.normal({make.n, make.m})}, {"p", 3}});
  });
  add_sorts(table);
}

}  // namespace tessera::testing
