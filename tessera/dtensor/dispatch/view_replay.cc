// Views of DTensors under autograd. When a view is written in place, autograd needs the same view of the base's
// gradient. Autograd makes this view with as_strided, which DTensors do not support, or by calling the view operation
// again ("view replay") if replay was enabled when the view was made. The kernels in this file enable view replay for
// every view operation.
//
// Operations that change a shape in place, such as squeeze_, need more. as_strided gives the right view even if the
// base's shape has changed after the view was made, because strides describe memory. A replayed view operation would
// run on a base of another shape. Therefore the view function of a DTensor view records the base's sizes, strides and
// placements (ViewOfRecordedBase) and later in-place changes of the view's own shape (ChainedView).
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>

#include "tessera/dtensor/dispatch/plan.h"

namespace tessera {

namespace {

class EnableViewReplay {
 public:
  EnableViewReplay() : before_(c10::AutogradState::get_tls_state().get_view_replay_enabled()) { set(true); }
  ~EnableViewReplay() { set(before_); }
  EnableViewReplay(const EnableViewReplay&) = delete;
  EnableViewReplay& operator=(const EnableViewReplay&) = delete;

 private:
  static void set(bool on) { c10::AutogradState::get_tls_state().set_view_replay_enabled(on); }
  bool before_;
};

// Replays a view by two view functions, one after the other.
class ChainedView final : public torch::autograd::ViewFunc {
 public:
  using Next = std::function<at::Tensor(const at::Tensor&)>;
  ChainedView(std::unique_ptr<torch::autograd::ViewFunc> first, Next next)
      : first_(std::move(first)), next_(std::move(next)) {}
  at::Tensor operator()(const at::Tensor& base) const override { return next_((*first_)(base)); }
  std::unique_ptr<torch::autograd::ViewFunc> clone_and_set(std::optional<std::vector<c10::SymInt>>,
                                                           std::optional<std::vector<at::Tensor>>) const override {
    return std::make_unique<ChainedView>(first_->clone_and_set(), next_);
  }

 private:
  std::unique_ptr<torch::autograd::ViewFunc> first_;
  Next next_;
};

// Returns the ViewInfo of a view that autograd replays, null for other tensors.
torch::autograd::ViewInfo* replayed_view(const at::Tensor& view) {
  auto* meta = torch::autograd::impl::get_view_autograd_meta(view);
  const bool replayed = meta != nullptr && meta->has_bw_view() && meta->get_backward_view().has_view_fn();
  return replayed ? &const_cast<torch::autograd::ViewInfo&>(meta->get_backward_view()) : nullptr;
}

// Appends `change`, an in-place change of the view's shape, to the view's replay function.
void record_shape_change(const at::Tensor& view, ChainedView::Next change) {
  if (auto* info = replayed_view(view)) {
    info->view_fn_ = std::make_unique<ChainedView>(std::move(info->view_fn_), std::move(change));
  }
}

// Replays a view whose base may have changed its shape in place since: gives the base its recorded shape, then calls
// the view function.
class ViewOfRecordedBase final : public torch::autograd::ViewFunc {
 public:
  ViewOfRecordedBase(Sizes sizes, Sizes strides, PlacementsPtr placements,
                     std::unique_ptr<torch::autograd::ViewFunc> view)
      : sizes_(std::move(sizes)),
        strides_(std::move(strides)),
        placements_(std::move(placements)),
        view_(std::move(view)) {}
  at::Tensor operator()(const at::Tensor& base) const override {
    const bool as_it_was = base.sizes() == c10::IntArrayRef(sizes_) &&
                           has_same_layout(sizes_, base.strides(), strides_) && !has_other_shards(base);
    return (*view_)(as_it_was ? base : restored(base));
  }
  std::unique_ptr<torch::autograd::ViewFunc> clone_and_set(std::optional<std::vector<c10::SymInt>>,
                                                           std::optional<std::vector<at::Tensor>>) const override {
    return std::make_unique<ViewOfRecordedBase>(sizes_, strides_, placements_, view_->clone_and_set());
  }

 private:
  // The mesh dims that shard tensor dim `dim`; bit m stands for mesh dim m.
  static uint64_t mesh_dims_of_shard(const Placements& placements, size_t dim) {
    uint64_t shard_mesh_dims = 0;
    for (size_t m = 0; m < placements.size(); ++m) {
      const bool is_sharded = placements[m].is_any_shard() && placements[m].dim == static_cast<int64_t>(dim);
      shard_mesh_dims |= uint64_t{is_sharded} << m;
    }
    return shard_mesh_dims;
  }

  // Returns whether a dim of size 1 that is sharded in the recorded placements (`placements_`) is not sharded over the
  // same mesh dims in `base`. The stride of a dim of size 1 does not identify the dim, so the mesh dims that shard the
  // dim are compared.
  bool has_other_shards(const at::Tensor& base) const {
    const auto& now = impl_of(base)->placements();
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const uint64_t shard_mesh_dims = sizes_[i] == 1 ? mesh_dims_of_shard(placements_->values, i) : 0;
      if (shard_mesh_dims != 0 && shard_mesh_dims != mesh_dims_of_shard(now, i)) return true;
    }
    return false;
  }

  // In-place operations have changed the shape of `base` since ViewOfRecordedBase recorded it. Returns a view of `base`
  // with the recorded shape. A recorded dim of size 2 or more is found in `base` by its size and stride, a sharded dim
  // of size 1 by the mesh dims that shard it. Other dims of size 1 cannot be found, so those of `base` are removed and
  // those of the recorded shape are added.
  at::Tensor restored(const at::Tensor& base) const {
    const auto& placements = impl_of(base)->placements();
    std::vector<int64_t> order;
    const auto is_taken = [&](int64_t dim) { return std::ranges::find(order, dim) != order.end(); };
    std::vector<bool> found(sizes_.size(), false);
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const bool one = sizes_[i] == 1;
      const uint64_t shard_mesh_dims = mesh_dims_of_shard(placements_->values, i);
      if (one && shard_mesh_dims == 0) continue;
      for (int64_t dim = 0; dim < base.dim() && !found[i]; ++dim) {
        const bool same_stride = base.numel() == 0 || base.stride(dim) == strides_[i];  // without elements any stride
        const bool same =
            one ? mesh_dims_of_shard(placements, static_cast<size_t>(dim)) == shard_mesh_dims : same_stride;
        if (!is_taken(dim) && base.size(dim) == sizes_[i] && same) {
          order.push_back(dim);
          found[i] = true;
        }
      }
    }
    const auto kept = static_cast<int64_t>(order.size());
    for (int64_t dim = 0; dim < base.dim(); ++dim) {
      if (base.size(dim) == 1 && !is_taken(dim)) order.push_back(dim);
    }
    at::Tensor moved = base.permute(order);
    while (moved.dim() > kept) moved = moved.squeeze(-1);
    for (size_t i = 0; i < sizes_.size(); ++i) {
      moved = sizes_[i] == 1 && !found[i] ? moved.unsqueeze(static_cast<int64_t>(i)) : moved;
    }
    return moved;
  }

  Sizes sizes_;
  Sizes strides_;
  PlacementsPtr placements_;
  std::unique_ptr<torch::autograd::ViewFunc> view_;
};

void record_base_layout(const at::Tensor& view, const at::Tensor& base) {
  auto* info = base.is_view() ? nullptr : replayed_view(view);
  if (info != nullptr) {
    info->view_fn_ = std::make_unique<ViewOfRecordedBase>(
        Sizes(base.sizes().begin(), base.sizes().end()), Sizes(base.strides().begin(), base.strides().end()),
        impl_of(base)->shared_placements(), std::move(info->view_fn_));
  }
}

void record_base_layout(const std::vector<at::Tensor>& views, const at::Tensor& base) {
  for (const auto& view : views) record_base_layout(view, base);
}

template <class Op, class Schema = typename Op::schema>
struct ReplayedViewKernel;
template <class Op, class Result, class... Args>
struct ReplayedViewKernel<Op, Result(const at::Tensor&, Args...)> {
  static Result call(c10::DispatchKeySet keys, const at::Tensor& self, Args... args) {
    const EnableViewReplay replay;
    Result views = Op::redispatch(keys_of_all_backends(keys), self, std::forward<Args>(args)...);
    record_base_layout(views, self);
    return views;
  }
};

inline int64_t stored_argument(int64_t dim) { return dim; }
inline std::vector<int64_t> stored_argument(c10::IntArrayRef dims) { return dims.vec(); }

// Autograd kernel of `Op`, an operation that changes a shape in place, such as squeeze_. `View` is the out-of-place
// form of `Op`.
template <class Op, class View, class Schema = typename Op::schema>
struct InPlaceViewKernel;
template <class Op, class View, class... Args>
struct InPlaceViewKernel<Op, View, at::Tensor&(at::Tensor&, Args...)> {
  static at::Tensor& call(c10::DispatchKeySet keys, at::Tensor& self, Args... args) {
    Op::redispatch(keys_of_all_backends(keys), self, args...);
    record_shape_change(
        self, [... kept = stored_argument(args)](const at::Tensor& base) { return View::call(base, kept...); });
    return self;
  }
};

template <class Op, class View>
void add_changed(torch::Library& library, const char* name) {
  using Changed = InPlaceViewKernel<Op, View>;
  library.impl(name, TORCH_FN(Changed::call));
}

template <class... Ops>
void add(torch::Library& library) {
  const auto name = [](const char* name, const std::string& overload) {
    return overload.empty() ? std::string(name) : name + ("." + overload);
  };
  (library.impl(name(Ops::name, Ops::overload_name).c_str(), TORCH_FN(ReplayedViewKernel<Ops>::call)), ...);
}

}  // namespace

void register_view_replay(torch::Library& autograd) {
  using namespace at::_ops;
  add<select_int, slice_Tensor, view, transpose_int, t, permute, expand, unsqueeze, squeeze, squeeze_dim, squeeze_dims,
      diagonal, unfold, _reshape_alias, alias, detach, view_dtype, view_as_real, view_as_complex, _conj, _neg_view,
      unbind_int, split_Tensor, split_with_sizes>(autograd);
  add_changed<squeeze_, squeeze>(autograd, "squeeze_");
  add_changed<squeeze__dim, squeeze_dim>(autograd, "squeeze_.dim");
  add_changed<squeeze__dims, squeeze_dims>(autograd, "squeeze_.dims");
  add_changed<unsqueeze_, unsqueeze>(autograd, "unsqueeze_");
  add_changed<t_, t>(autograd, "t_");
  add_changed<transpose_, transpose_int>(autograd, "transpose_");
}

}  // namespace tessera
