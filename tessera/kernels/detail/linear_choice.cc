#include "tessera/kernels/detail/linear_choice.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/version.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/host.h"
#include "tessera/base/log.h"
#include "tessera/base/user_cache.h"

namespace tessera::detail {
namespace {

using LinearPointwise = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                   std::string_view, c10::List<std::optional<at::Scalar>>,
                                   std::optional<std::string_view>);

// Without oneDNN in libtorch there is no such op.
const std::optional<c10::TypedOperatorHandle<LinearPointwise>>& linear_pointwise() {
  static const auto handle = []() -> std::optional<c10::TypedOperatorHandle<LinearPointwise>> {
    const auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (!found || !found->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return std::nullopt;
    return found->typed<LinearPointwise>();
  }();
  return handle;
}

thread_local std::optional<bool> used;  // by UseLinearKernel

enum class Agreed { kNothing, kAten, kOneDnn };
std::atomic<Agreed> agreed{Agreed::kNothing};

template <class F>
double best_seconds(int rounds, F&& call) {
  double best = 1e9;
  for (int round = 0; round < rounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

// oneDNN has to win clearly: a near tie must not go one way today and the other tomorrow.
bool measure_onednn() {
  at::NoGradGuard no_grad;
  const auto x = at::ones({256, 512});
  const auto weight = at::ones({768, 512});
  double onednn = 1e9, aten = 1e9;
  for (int round = 0; round < 4; ++round) {
    onednn = std::min(onednn, best_seconds(2, [&] { onednn_product(x, weight, {}); }));
    aten = std::min(aten, best_seconds(2, [&] { at::linear(x, weight); }));
  }
  log_debug("[kernels.linear] fp32 256x512x768: oneDNN {:.3f} ms, at::linear {:.3f} ms", onednn * 1e3, aten * 1e3);
  return onednn * 1.1 < aten;
}

// One file for each processor model and libtorch. Not for each number of threads, though a measurement depends on that
// a little: ranks of one machine round alike, however many of them share its cores.
std::filesystem::path choice_file() {
  const auto folder = user_cache();
  if (folder.empty()) return {};
  std::string processor = processor_model();
  for (char& c : processor) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '-';
  }
  return folder / fmt::format("linear-{}-torch{}", processor, TORCH_VERSION);
}

std::optional<bool> read_choice(const std::filesystem::path& file) {
  std::error_code missing;
  if (!std::filesystem::exists(file, missing)) return std::nullopt;
  try {
    const auto text = read_file(file, 64);
    if (text == "onednn\n") return true;
    if (text == "aten\n") return false;
  } catch (const Error& unreadable) {
    log_debug("[kernels.linear] {}", unreadable.what());
  }
  return std::nullopt;
}

}  // namespace

at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return linear_pointwise()->call(x, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt, "none",
                                  c10::List<std::optional<at::Scalar>>(), "");
}

bool kept_choice(const std::filesystem::path& file, bool (*measure)()) {
  if (const auto kept = read_choice(file)) return *kept;
  const bool measured = measure();
  std::error_code ignored;
  std::filesystem::create_directories(file.parent_path(), ignored);
  const auto temporary = fmt::format("{}.{}", file.string(), ::getpid());
  try {
    publish_file(temporary, measured ? "onednn\n" : "aten\n");
  } catch (const Error& error) {
    log_debug("[kernels.linear] the choice is not kept: {}", error.what());
    return measured;
  }
  const bool first = ::link(temporary.c_str(), file.c_str()) == 0;
  ::unlink(temporary.c_str());
  return first ? measured : read_choice(file).value_or(measured);
}

UseLinearKernel::UseLinearKernel(bool onednn) : before_(used) {
  TESSERA_CHECK(!onednn || linear_pointwise(), ErrorKind::kConfig, "[kernels.linear] this libtorch has no oneDNN");
  used = onednn;
}

UseLinearKernel::~UseLinearKernel() { used = before_; }

bool has_onednn() { return linear_pointwise().has_value(); }

void set_linear_choice(bool onednn) { agreed = onednn ? Agreed::kOneDnn : Agreed::kAten; }

bool onednn_is_faster() {
  if (used) return *used;
  if (const auto choice = agreed.load(); choice != Agreed::kNothing) return choice == Agreed::kOneDnn;
  static const bool choice = [] {
    if (!linear_pointwise()) return false;
    if (const char* given = std::getenv("TESSERA_LINEAR"); given && *given) {
      const std::string_view name = given;
      TESSERA_CHECK(name == "onednn" || name == "aten", ErrorKind::kConfig,
                    "[kernels.linear] TESSERA_LINEAR: found '{}', wanted onednn or aten. Correct it or unset it.",
                    name);
      return name == "onednn";
    }
    const auto file = choice_file();
    return file.empty() ? measure_onednn() : kept_choice(file, measure_onednn);
  }();
  return choice;
}

}  // namespace tessera::detail
