// Samples for decompositions and solvers, over batches of n small matrices.
#include "tests/conformance/samples.h"

namespace tessera::testing {

namespace {

void square(SampleMaker& make, const char* name) {
  make.add({{name, make.well_conditioned({make.n, make.k, make.k})}});
}

// The factors are unique up to signs, so their product is compared.
Tensors product_of_svd(const std::vector<c10::IValue>&, const Tensors& results) {
  return {results[1], (results[0] * results[1].unsqueeze(-2)).matmul(results[2])};
}

Tensors product_of_eigh(const std::vector<c10::IValue>&, const Tensors& results) {
  return {results[0], (results[1] * results[0].unsqueeze(-2)).matmul(results[1].mT())};
}

// Eigenvalues have any order, and eigenvectors are unique up to a factor. Compared are A V = V diag(L) and the sums of
// powers of the eigenvalues.
Tensors checked_eig(const std::vector<c10::IValue>& args, const Tensors& results) {
  const at::Tensor matrix = args[0].toTensor().to(results[1].scalar_type());
  return {results[0].sum(-1), results[0].pow(2).sum(-1),
          matrix.matmul(results[1]) - results[1] * results[0].unsqueeze(-2)};
}

void add_decompositions(SampleTable& table) {
  table.add({"aten::_linalg_det", "aten::_linalg_slogdet", "aten::linalg_inv_ex", "aten::linalg_lu",
             "aten::linalg_lu_factor_ex", "aten::linalg_qr"},
            [](SampleMaker& make) { square(make, "A"); });
  table.add({"aten::cholesky", "aten::linalg_cholesky_ex"}, [](SampleMaker& make) {
    make.add({{"self", make.positive_definite({make.n, make.k, make.k})}});
  });
  table.add("aten::cholesky_inverse", [](SampleMaker& make) {
    make.add({{"self", make.positive_definite({make.n, make.k, make.k}).tril()}});
  });
  table.add("aten::linalg_ldl_factor_ex", [](SampleMaker& make) {
    make.add({{"self", make.positive_definite({make.n, make.k, make.k})}});
  });
  table.add("aten::geqrf", [](SampleMaker& make) { square(make, "self"); });
  table.add("aten::linalg_matrix_exp", [](SampleMaker& make) {
    make.add({{"self", make.uniform(-0.5, 0.5, {make.n, make.k, make.k})}});
  });
  table.add("aten::_linalg_eigh", [](SampleMaker& make) {
    make.add({{"A", make.positive_definite({make.n, make.k, make.k})}}).canonical = product_of_eigh;
  });
  table.add("aten::linalg_eig", [](SampleMaker& make) {
    Sample& sample = make.add({{"self", make.well_conditioned({make.n, make.k, make.k})}});
    sample.canonical = checked_eig;
    sample.gradient = false;  // its results are not unique
  });
  table.add("aten::_linalg_svd", [](SampleMaker& make) {
    Sample& sample = make.add({{"A", make.normal({make.n, make.k, 5})}});
    sample.canonical = product_of_svd;
    sample.gradient = false;
  });
  table.add("aten::linalg_pinv", [](SampleMaker& make) {
    make.add({{"self", make.well_conditioned({make.n, make.k, make.k})},
              {"rtol", at::scalar_tensor(1e-12, at::kDouble)}})
        .tolerance = 1e-7;
  });
  table.add("aten::lu_unpack", [](SampleMaker& make) {
    const auto [lu, pivots, info] = at::linalg_lu_factor_ex(make.well_conditioned({make.n, make.k, make.k}));
    make.add({{"LU_data", lu}, {"LU_pivots", pivots}});
  });
  table.add("aten::linalg_householder_product", [](SampleMaker& make) {
    const auto [input, tau] = at::geqrf(make.normal({make.n, make.k + 1, make.k}));
    make.add({{"input", input}, {"tau", tau}});
  });
  table.add("aten::ormqr", [](SampleMaker& make) {
    const auto [input, tau] = at::geqrf(make.well_conditioned({make.n, make.k, make.k}));
    make.add({{"self", input}, {"input2", tau}, {"input3", make.normal({make.n, make.k, 2})}});
  });
}

void add_solvers(SampleTable& table) {
  table.add("aten::cholesky_solve", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.k, 2})},
              {"input2", make.positive_definite({make.n, make.k, make.k}).tril()}});
  });
  table.add("aten::_linalg_solve_ex", [](SampleMaker& make) {
    make.add({{"A", make.well_conditioned({make.n, make.k, make.k})}, {"B", make.normal({make.n, make.k, 2})}});
  });
  table.add("aten::linalg_solve_triangular", [](SampleMaker& make) {
    make.add({{"self", make.well_conditioned({make.n, make.k, make.k}).triu()},
              {"B", make.normal({make.n, make.k, 2})},
              {"upper", true}});
  });
  table.add("aten::triangular_solve", [](SampleMaker& make) {
    make.add(
        {{"self", make.normal({make.n, make.k, 2})}, {"A", make.well_conditioned({make.n, make.k, make.k}).triu()}});
  });
  table.add("aten::linalg_lu_solve", [](SampleMaker& make) {
    const auto [lu, pivots, info] = at::linalg_lu_factor_ex(make.well_conditioned({make.n, make.k, make.k}));
    make.add({{"LU", lu}, {"pivots", pivots}, {"B", make.normal({make.n, make.k, 2})}});
  });
  table.add("aten::linalg_ldl_solve", [](SampleMaker& make) {
    const auto [ld, pivots, info] = at::linalg_ldl_factor_ex(make.positive_definite({make.n, make.k, make.k}));
    make.add({{"LD", ld}, {"pivots", pivots}, {"B", make.normal({make.n, make.k, 2})}});
  });
  table.add("aten::linalg_cross", [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, 3})}, {"other", make.normal({make.n, 3})}});
  });
  table.add("aten::_linalg_check_errors", [](SampleMaker& make) {
    make.add({{"info", at::zeros({make.n}, at::kInt)}, {"api_name", "linalg.cholesky"}, {"is_matrix", false}});
  });
}

}  // namespace

void add_linalg_samples(SampleTable& table) {
  add_decompositions(table);
  add_solvers(table);
}

}  // namespace tessera::testing
