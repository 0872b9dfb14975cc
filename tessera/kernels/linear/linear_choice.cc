#include "tessera/kernels/linear/linear_choice.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/version.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/user_cache.h"
#include "tessera/base/log.h"
#include "tessera/base/machine/host.h"

namespace tessera::kernels {
namespace {

using LinearPointwise = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                   std::string_view, c10::List<std::optional<at::Scalar>>,
                                   std::optional<std::string_view>);

// Returns oneDNN's linear operation; nullopt where libtorch was built without oneDNN.
const std::optional<c10::TypedOperatorHandle<LinearPointwise>>& linear_pointwise() {
  static const auto handle = []() -> std::optional<c10::TypedOperatorHandle<LinearPointwise>> {
    const auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (!found || !found->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return std::nullopt;
    return found->typed<LinearPointwise>();
  }();
  return handle;
}

thread_local std::optional<bool> thread_choice;  // set by LinearKernelGuard

constexpr KernelChoiceNames kFp32Names{"onednn", "aten"}, k16BitNames{"fp32", "native"};

struct KernelTimes {
  double first, second;
};

// Times `first` and `second` in turn, so that a change of the machine's load affects both, and returns the shortest
// time of each.
template <class First, class Second>
KernelTimes best_of(const char* description, First&& first, Second&& second) {
  at::NoGradGuard no_grad;
  KernelTimes best{1e9, 1e9};
  const auto time_twice = [](auto&& call, double& shortest) {
    for (int i = 0; i < 2; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      call();
      shortest = std::min(shortest, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
  };
  for (int round = 0; round < 4; ++round) {
    time_twice(first, best.first);
    time_twice(second, best.second);
  }
  log_debug("[kernels.linear] {}: {:.3f} ms and {:.3f} ms", description, best.first * 1e3, best.second * 1e3);
  return best;
}

// Of the two kernels that best_of() times, the first is chosen only if it is faster than the second by this factor. If
// both are nearly equally fast, every run thus chooses the second, although the measured times vary.
constexpr double kMinSpeedup = 1.1;

bool measure_onednn() {
  const auto x = at::ones({256, 512}), weight = at::ones({768, 512});
  const auto times = best_of(
      "fp32 256x512x768 by oneDNN and at::linear", [&] { onednn_product(x, weight, {}); },
      [&] { at::linear(x, weight); });
  return times.first * kMinSpeedup < times.second;
}

// Times two products together: that of x with a square weight, and that of the weight gradient, whose first operand is
// transposed.
KernelTimes in_fp32_and_native(at::ScalarType type, int64_t rows, int64_t columns) {
  const auto x = at::ones({rows, columns}, type), weight = at::ones({columns, columns}, type);
  const auto both = [](const at::Tensor& a, const at::Tensor& b) { return at::linear(a, b).t().mm(a); };
  return best_of(
      "16 bits in fp32 and in their dtype", [&] { both(x.to(at::kFloat), weight.to(at::kFloat)).to(type); },
      [&] { both(x, weight); });
}

// Returns whether products in fp32 are measured to be faster than native products, those in `type` itself. Small
// products are timed first. On a processor without instructions for `type`, a small native product is already much
// slower than the small product in fp32, and a large native product would take too long to measure; so the small
// products decide. On a processor with such instructions the time of a small product is mostly the cost of the calls,
// so the large products decide.
bool measure_fp32(at::ScalarType type) {
  const auto small = in_fp32_and_native(type, 128, 256);
  if (small.first * 4 < small.second) return true;
  const auto large = in_fp32_and_native(type, 512, 768);
  return large.first * kMinSpeedup < large.second;
}

// Returns the path of the file that stores which kernels were measured to be faster; empty without a cache folder.
// There is one file per `kind` of choice, processor model and libtorch version. The number of threads is not in the
// name, although it changes the measured times a little: all ranks on a machine must use the same kernels, so that they
// round in the same way, however many ranks share the machine's cores.
std::filesystem::path choice_file(std::string_view kind) {
  const auto folder = user_cache();
  if (folder.empty()) return {};
  std::string processor = processor_model();
  for (char& c : processor) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '-';
  }
  return folder / fmt::format("{}-{}-torch{}", kind, processor, TORCH_VERSION);
}

std::optional<bool> read_choice(const std::filesystem::path& file, const KernelChoiceNames& names) {
  std::error_code missing;
  if (!std::filesystem::exists(file, missing)) return std::nullopt;
  try {
    const auto text = read_file(file, 64);
    if (text == fmt::format("{}\n", names.yes)) return true;
    if (text == fmt::format("{}\n", names.no)) return false;
  } catch (const Error& unreadable) {
    log_debug("[kernels.linear] {}", unreadable.what());
  }
  return std::nullopt;
}

// A choice between two kernels, made once per process. The first of these sources that has a value decides: set(),
// called with the choice that the ranks agreed on; the environment variable `variable`; the choice that is stored in a
// file of this machine; a measurement. If several threads call get(), call_once makes the others wait until one of them
// has made the choice. set() may be called at any time and overrides the other sources.
class KernelChoice {
 public:
  KernelChoice(const char* variable, std::string_view kind, const KernelChoiceNames& names,
               std::function<bool()> measure)
      : variable_(variable), kind_(kind), names_(names), measure_(std::move(measure)) {}

  void set(bool choice) { agreed_ = choice; }
  bool get() {
    if (const auto agreed = agreed_.load()) return *agreed;
    std::call_once(made_, [&] { own_ = make(); });
    return own_;
  }

 private:
  bool make() const {
    if (const char* value = std::getenv(variable_); value && *value) {
      const std::string_view name = value;
      TESSERA_CHECK(name == names_.yes || name == names_.no, ErrorKind::kConfig,
                    "[kernels.linear] {}: found '{}', wanted {} or {}. Correct it or unset it.", variable_, name,
                    names_.yes, names_.no);
      return name == names_.yes;
    }
    const auto file = choice_file(kind_);
    return file.empty() ? measure_() : stored_choice(file, names_, measure_);
  }

  const char* variable_;
  std::string_view kind_;
  KernelChoiceNames names_;
  std::function<bool()> measure_;
  std::atomic<std::optional<bool>> agreed_{};
  std::once_flag made_;
  bool own_ = false;
};

KernelChoice& onednn_choice() {
  static KernelChoice choice("TESSERA_LINEAR", "linear", kFp32Names, measure_onednn);
  return choice;
}

KernelChoice& fp32_choice(at::ScalarType type) {
  constexpr const char* kVariable = "TESSERA_LINEAR_16";
  static KernelChoice bf16(kVariable, "linear-bf16", k16BitNames, [] { return measure_fp32(at::kBFloat16); });
  static KernelChoice fp16(kVariable, "linear-fp16", k16BitNames, [] { return measure_fp32(at::kHalf); });
  return type == at::kHalf ? fp16 : bf16;
}

}  // namespace

at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return linear_pointwise()->call(x, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt, "none",
                                  c10::List<std::optional<at::Scalar>>(), "");
}

// Several processes may measure at once. Each writes a temporary file; link() fails if the choice file exists, so the
// first process decides and all others read its choice.
bool stored_choice(const std::filesystem::path& file, const KernelChoiceNames& names,
                   const std::function<bool()>& measure) {
  if (const auto kept = read_choice(file, names)) return *kept;
  const bool measured = measure();
  std::error_code ignored;
  std::filesystem::create_directories(file.parent_path(), ignored);
  const auto temporary = fmt::format("{}.{}", file.string(), ::getpid());
  try {
    publish_file(temporary, fmt::format("{}\n", measured ? names.yes : names.no));
  } catch (const Error& error) {
    log_debug("[kernels.linear] the measured choice was not stored: {}", error.what());
    return measured;
  }
  const bool first = ::link(temporary.c_str(), file.c_str()) == 0;
  ::unlink(temporary.c_str());
  return first ? measured : read_choice(file, names).value_or(measured);
}

LinearKernelGuard::LinearKernelGuard(bool onednn) : before_(thread_choice) {
  TESSERA_CHECK(!onednn || linear_pointwise(), ErrorKind::kConfig,
                "[kernels.linear] this libtorch has no oneDNN, through which products were to run");
  thread_choice = onednn;
}

LinearKernelGuard::~LinearKernelGuard() { thread_choice = before_; }

bool has_onednn() { return linear_pointwise().has_value(); }

void set_linear_choice(bool onednn) { onednn_choice().set(onednn); }

bool onednn_is_faster() { return thread_choice ? *thread_choice : linear_pointwise() && onednn_choice().get(); }

bool fp32_is_faster_for(at::ScalarType type) { return fp32_choice(type).get(); }

bool runs_in_fp32(const at::Tensor& operand) {
  const auto type = operand.scalar_type();
  return (type == at::kBFloat16 || type == at::kHalf) && operand.is_cpu() && fp32_is_faster_for(type);
}

void set_fp32_choice(at::ScalarType type, bool fp32) { fp32_choice(type).set(fp32); }

}  // namespace tessera::kernels
