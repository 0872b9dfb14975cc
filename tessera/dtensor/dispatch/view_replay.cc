// Views of DTensors under autograd. A write to a view changes its base's history: autograd then needs the view of the
// base's gradient, which it takes by as_strided, that DTensors lack, or by calling the operation again, if it was told
// to remember it. It is told so here, for every operation that gives a view.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_conj_ops.h>
#include <ATen/ops/_neg_view_ops.h>
#include <ATen/ops/_reshape_alias_ops.h>
#include <ATen/ops/alias_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/diagonal_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/split_ops.h>
#include <ATen/ops/split_with_sizes_ops.h>
#include <ATen/ops/squeeze_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unbind_ops.h>
#include <ATen/ops/unfold_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_as_complex_ops.h>
#include <ATen/ops/view_as_real_ops.h>
#include <ATen/ops/view_ops.h>
#include <c10/core/AutogradState.h>
#include <torch/library.h>

#include "tessera/dtensor/dispatch/plan.h"

namespace tessera::detail {

namespace {

class RememberViews {
 public:
  RememberViews() : before_(c10::AutogradState::get_tls_state().get_view_replay_enabled()) { set(true); }
  ~RememberViews() { set(before_); }
  RememberViews(const RememberViews&) = delete;
  RememberViews& operator=(const RememberViews&) = delete;

 private:
  static void set(bool on) { c10::AutogradState::get_tls_state().set_view_replay_enabled(on); }
  bool before_;
};

template <class Op, class Schema = typename Op::schema>
struct Replayed;
template <class Op, class Result, class... Args>
struct Replayed<Op, Result(Args...)> {
  // Goes on to what libtorch has for all back-ends.
  static Result call(c10::DispatchKeySet keys, Args... args) {
    const RememberViews remember;
    const c10::DispatchKeySet below = keys & c10::after_autograd_keyset;
    return Op::redispatch(below.add(c10::DispatchKey::AutogradOther), std::forward<Args>(args)...);
  }
};

template <class... Ops>
void add(torch::Library& library) {
  const auto name = [](const char* name, const std::string& overload) {
    return overload.empty() ? std::string(name) : name + ("." + overload);
  };
  (library.impl(name(Ops::name, Ops::overload_name).c_str(), TORCH_FN(Replayed<Ops>::call)), ...);
}

}  // namespace

void register_view_replay() {
  // Never destroyed: the dispatcher keeps calling the kernels. Volatile: see register_composites.
  static auto* volatile library = [] {
    using namespace at::_ops;
    auto* made =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse3, __FILE__, __LINE__);
    add<select_int, slice_Tensor, view, transpose_int, t, permute, expand, unsqueeze, squeeze, squeeze_dim,
        squeeze_dims, diagonal, unfold, _reshape_alias, alias, detach, view_dtype, view_as_real, view_as_complex, _conj,
        _neg_view, unbind_int, split_Tensor, split_with_sizes>(*made);
    return made;
  }();
  (void)library;
}

}  // namespace tessera::detail
