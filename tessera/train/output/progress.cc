#include "tessera/train/output/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "tessera/train/output/outliers.h"

namespace tessera::train {
namespace {

constexpr std::string_view kRed = "\x1b[31m", kPlain = "\x1b[0m", kEraseLine = "\r\x1b[K";

void write_stderr(std::string_view text) {
  // An error is ignored: there is no other place to report that stderr cannot be written.
  [[maybe_unused]] const auto ignored = ::write(STDERR_FILENO, text.data(), text.size());
}

// The value, followed by its z-score if the value is an outlier.
std::string flagged(const std::string& value, double z, bool colour) {
  if (std::isnan(z) || std::abs(z) < kOutlierZ) return value;
  const std::string text = fmt::format("{} (z {:+.1f}!)", value, z);
  return colour ? fmt::format("{}{}{}", kRed, text, kPlain) : text;
}

std::string format_bytes(int64_t bytes) {
  const double mebibytes = static_cast<double>(bytes) / (1 << 20);
  return mebibytes < 10000 ? fmt::format("{:.0f} MiB", mebibytes) : fmt::format("{:.1f} GiB", mebibytes / 1024);
}

}  // namespace

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  const auto all = static_cast<int64_t>(std::min(std::round(seconds), 1e9));
  const int64_t days = all / 86400, hours = all / 3600 % 24, minutes = all / 60 % 60;
  if (days > 0) return fmt::format("{}d {:02}:{:02}", days, hours, minutes);
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, all % 60);
  return fmt::format("{}:{:02}", minutes, all % 60);
}

std::string format_step(const StepMetrics& metrics, const ProgressOptions& options, double eta_seconds) {
  const auto width = std::to_string(options.total_steps).size();
  const std::string loss = flagged(fmt::format("{:.4f}", metrics.loss), metrics.loss_z, options.colour);
  const std::string norm = flagged(fmt::format("{:.3f}", metrics.grad_norm), metrics.grad_norm_z, options.colour);
  return fmt::format("step {:>{}}/{}  loss {}  norm {}  lr {:.2e}  {:.0f} tok/s  {}  {:.0f}% of peak  eta {}{}",
                     metrics.step, width, options.total_steps, loss, norm, metrics.lr, metrics.tokens_per_second,
                     format_bytes(metrics.memory_bytes), 100 * metrics.peak_share, format_duration(eta_seconds),
                     metrics.skipped ? "  SKIPPED: not finite" : "");
}

ProgressOptions progress_for_stderr() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string_view(value ? value : "");
  };
  ProgressOptions options;
  options.terminal = ::isatty(STDERR_FILENO) == 1 && variable("TERM") != "dumb";
  options.colour = options.terminal && variable("NO_COLOR").empty();
  winsize size{};
  if (options.terminal && ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    options.columns = size.ws_col;
  }
  return options;
}

Progress::Progress(ProgressOptions options) : options_(std::move(options)), done_(options_.first_step) {
  if (!options_.write) options_.write = write_stderr;
}

void Progress::step(const StepMetrics& metrics) {
  constexpr double kSmoothing = 0.9;
  seconds_per_step_ =
      seconds_per_step_ == 0 ? metrics.seconds : kSmoothing * seconds_per_step_ + (1 - kSmoothing) * metrics.seconds;
  done_ = metrics.step;
  const double eta = seconds_per_step_ * static_cast<double>(options_.total_steps - done_);
  const bool due = options_.every > 0 && (metrics.step % options_.every == 0 || metrics.step == options_.total_steps);
  const bool outlier = std::abs(metrics.loss_z) >= kOutlierZ || std::abs(metrics.grad_norm_z) >= kOutlierZ;
  // A step that options_.every would leave out is printed all the same if its loss or gradient norm is an outlier, or
  // if it was skipped. With options_.every 0 no step is printed.
  print(due || (options_.every > 0 && (outlier || metrics.skipped)) ? format_step(metrics, options_, eta) : "");
}

void Progress::validation(int64_t step, double loss) {
  const auto width = std::to_string(options_.total_steps).size();
  print(fmt::format("step {:>{}}/{}  validation loss {:.4f}", step, width, options_.total_steps, loss));
}

void Progress::sample(int64_t step, std::string_view prompt, std::string_view text) {
  const auto width = std::to_string(options_.total_steps).size();
  print(fmt::format("step {:>{}}/{}  sample {} -> {}", step, width, options_.total_steps, prompt, text));
}

void Progress::finish(std::string_view last_line) {
  std::string text(options_.terminal ? kEraseLine : "");
  if (!last_line.empty()) text += fmt::format("{}\n", last_line);
  options_.write(text);
}

// Erases the bar, prints the line and draws the bar again, all in one write.
void Progress::print(const std::string& line) {
  std::string text(options_.terminal ? kEraseLine : "");
  if (!line.empty()) text += line + "\n";
  if (options_.terminal) text += bar();
  if (!text.empty()) options_.write(text);
}

std::string Progress::bar() const {
  const double share =
      options_.total_steps > 0
          ? std::clamp(static_cast<double>(done_) / static_cast<double>(options_.total_steps), 0.0, 1.0)
          : 0;
  std::string end = fmt::format(" {:3.0f}%  eta {}", 100 * share,
                                format_duration(seconds_per_step_ * static_cast<double>(options_.total_steps - done_)));
  // The bar takes the columns that the percentage and the remaining time leave, at most 60.
  const int room = std::min(options_.columns - static_cast<int>(end.size()) - 3, 60);
  if (room < 5) return end;
  const int filled = static_cast<int>(share * room);
  return fmt::format("[{}{}]{}", std::string(static_cast<size_t>(filled), '#'),
                     std::string(static_cast<size_t>(room - filled), '.'), end);
}

}  // namespace tessera::train
