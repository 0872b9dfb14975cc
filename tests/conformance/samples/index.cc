// Samples for operations that read and write at indices.
#include "tests/conformance/samples.h"

namespace tessera::testing {

namespace {

using Ints = std::vector<int64_t>;
using MaybeTensors = c10::List<std::optional<at::Tensor>>;

MaybeTensors at_rows(const at::Tensor& index) { return MaybeTensors({std::optional<at::Tensor>(index)}); }

MaybeTensors at_columns(const at::Tensor& index) {
  return MaybeTensors({std::optional<at::Tensor>(), std::optional<at::Tensor>(index)});
}

// Each index occurs once, so that the result of a write does not depend on the order.
at::Tensor some_of(int64_t count, int64_t size) { return (at::arange(count, at::kLong) * 2 + 1) % size; }

void add_embeddings(SampleTable& table) {
  table.add("aten::embedding", [](SampleMaker& make) {
    make.add({{"weight", make.normal({make.m, 4})}, {"indices", make.integers(0, make.m, {make.n})}});
    if (make.n > 0) {
      make.add({{"weight", make.normal({make.n, make.m})},
                {"indices", make.integers(0, make.n, {3, 2})},
                {"padding_idx", 0}});
    }
  });
  table.add("aten::embedding_dense_backward", [](SampleMaker& make) {
    make.add({{"grad_output", make.normal({make.n, 2, 4})},
              {"indices", make.integers(0, make.m, {make.n, 2})},
              {"num_weights", make.m},
              {"padding_idx", -1},
              {"scale_grad_by_freq", false}})
        .gradient = false;  // its formula flattens the indices by view()
    make.add({{"grad_output", make.normal({make.n, make.m})},
              {"indices", make.integers(0, make.m, {make.n})},
              {"num_weights", make.m},
              {"padding_idx", 1},
              {"scale_grad_by_freq", false}});
  });
}

void add_gathers(SampleTable& table) {
  table.add("aten::one_hot", [](SampleMaker& make) {
    make.add({{"self", make.integers(0, 4, {make.n, make.m})}, {"num_classes", 5}});
    if (make.n > 0) make.add({{"self", make.integers(0, 4, {make.n})}});
  });
  table.add("aten::gather", [](SampleMaker& make) {
    make.add(
        {{"self", make.normal({make.n, make.m})}, {"dim", 1}, {"index", make.integers(0, make.m, {make.n, make.k})}});
    make.add({{"self", make.normal({make.n, make.m})}, {"dim", 1}, {"index", make.integers(0, make.m, {make.n, 1})}});
    if (make.n > 0) {
      make.add({{"self", make.normal({make.n, make.m})}, {"dim", 0}, {"index", make.integers(0, make.n, {4, make.m})}});
    }
  });
  table.add("aten::index_select", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"dim", 1}, {"index", make.integers(0, make.m, {4})}});
    if (make.n > 0) {
      make.add({{"self", make.normal({make.n, make.m})}, {"dim", 0}, {"index", make.integers(0, make.n, {4})}});
    }
  });
  table.add("aten::index", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m, make.k})}, {"indices", at_columns(make.integers(0, make.m, {4}))}});
    if (make.n > 0) {
      make.add({{"self", make.normal({make.n, make.m})}, {"indices", at_rows(make.integers(0, make.n, {4, 2}))}});
      make.add({{"self", make.normal({make.n, make.m, make.k})},
                {"indices", MaybeTensors({std::optional<at::Tensor>(make.integers(0, make.n, {4})),
                                          std::optional<at::Tensor>(make.integers(0, make.m, {4}))})}});
    }
  });
}

void add_writes(SampleTable& table) {
  table.add({"aten::index_put", "aten::_index_put_impl"}, [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})},
              {"indices", at_columns(some_of(make.k, make.m))},
              {"values", make.normal({make.n, make.k})}});
    if (make.n > 0) {
      make.add({{"self", make.normal({make.n, make.m})},
                {"indices", at_rows(make.integers(0, make.n, {4}))},
                {"values", make.normal({4, make.m})},
                {"accumulate", true}});
    }
  });
  table.add("aten::index_fill", [](SampleMaker& make) {
    const c10::IValue value = make.overload().find("int_Tensor") != std::string::npos
                                  ? c10::IValue(at::scalar_tensor(2.5, at::kDouble))
                                  : c10::IValue(2.5);
    make.add({{"self", make.normal({make.n, make.m})}, {"dim", 1}, {"index", some_of(2, make.m)}, {"value", value}});
    if (make.n > 0) {
      make.add({{"self", make.normal({make.n, make.m})},
                {"dim", 0},
                {"index", make.integers(0, make.n, {2})},
                {"value", value}});
    }
  });
  table.add("aten::index_reduce", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})},
              {"dim", 1},
              {"index", some_of(make.k, make.m)},
              {"source", make.normal({make.n, make.k})},
              {"reduce", "amax"}});
    if (make.n > 0) {
      make.add({{"self", make.normal({make.n, make.m})},
                {"dim", 0},
                {"index", make.integers(0, make.n, {4})},
                {"source", make.normal({4, make.m})},
                {"reduce", "mean"},
                {"include_self", false}});
    }
  });
  table.add("aten::scatter.src", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})},
              {"dim", 1},
              {"index", some_of(make.k, make.m).expand({make.n, make.k}).clone()},
              {"src", make.normal({make.n, make.k})}});
    if (make.n > 1) {
      make.add({{"self", make.normal({make.n, make.m})},
                {"dim", 0},
                {"index", (at::arange(2 * make.m, at::kLong).view({2, make.m}) / make.m).to(at::kLong)},
                {"src", make.normal({2, make.m})}});
    }
  });
  table.add("aten::scatter.value", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})},
              {"dim", 1},
              {"index", make.integers(0, make.m, {make.n, make.k})},
              {"value", 2.5}});
  });
  table.add("aten::scatter_add", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})},
              {"dim", 1},
              {"index", make.integers(0, make.m, {make.n, make.k})},
              {"src", make.normal({make.n, make.k})}});
    if (make.n > 0) {
      make.add({{"self", make.normal({make.n, make.m})},
                {"dim", 0},
                {"index", make.integers(0, make.n, {4, make.m})},
                {"src", make.normal({4, make.m})}});
    }
  });
}

// Operations that write a tensor into the part of another tensor that a view selects.
void add_view_writes(SampleTable& table) {
  table.add("aten::select_backward", [](SampleMaker& make) {
    make.add({{"grad_output", make.normal({make.n, make.m})},
              {"input_sizes", Ints{make.n, 4, make.m}},
              {"dim", 1},
              {"index", 2}});
  });
  table.add("aten::slice_backward", [](SampleMaker& make) {
    make.add({{"grad_output", make.normal({make.n, 2})},
              {"input_sizes", Ints{make.n, make.m}},
              {"dim", 1},
              {"start", 1},
              {"end", 4},
              {"step", 2}});
  });
  table.add("aten::select_scatter", [](SampleMaker& make) {
    make.add(
        {{"self", make.normal({make.n, 4, make.m})}, {"src", make.normal({make.n, make.m})}, {"dim", 1}, {"index", 2}});
  });
  table.add("aten::slice_scatter", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})},
              {"src", make.normal({make.n, 2})},
              {"dim", 1},
              {"start", 1},
              {"end", 3}});
  });
  table.add("aten::diagonal_scatter", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, 4, 4})}, {"src", make.normal({make.n, 4})}, {"dim1", 1}, {"dim2", 2}});
  });
}

}  // namespace

void add_index_samples(SampleTable& table) {
  add_embeddings(table);
  add_gathers(table);
  add_writes(table);
  add_view_writes(table);
}

}  // namespace tessera::testing
