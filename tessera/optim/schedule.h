// The learning rate of each step: linear warm-up, then cosine or linear decay to a floor, constant, or constant with a
// decay at the end (wsd: warm-up, stable, decay).
//
//   optim::Schedule schedule(
//       {.name = "cosine", .lr = 1e-4, .warmup_steps = 10, .total_steps = 100, .min_lr_ratio = 0.1});
//   optimizer->set_lr(schedule.at(step));      // step counts from 0
//
// With T total steps and W warm-up steps, step t < W has lr * (t + 1) / W (as torchtitan; step 0 already learns). Later
// steps have the values of transformers' get_{linear,cosine}_schedule_with_warmup, cosine_with_min_lr and
// get_wsd_schedule. With the floor ratio r and p = (t - W) / (T - W):
//   cosine   lr * (r + (1 - r) * (1 + cos(pi p)) / 2)
//   linear   lr * (r + (1 - r) * (1 - p))
//   wsd      lr until D steps are left, then lr * (r + (1 - r) * f(p)) with p = (t - (T - D)) / D and f by decay_type:
//            linear 1 - p, cosine (1 + cos(pi p)) / 2, 1-sqrt 1 - sqrt(p)
// Step W has the full rate. Steps from T on have the floor r * lr. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::optim {

struct ScheduleOptions {
  std::string name = "cosine";  // cosine, linear, constant, wsd
  double lr = 1e-4;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;
  double min_lr_ratio = 0;  // floor of the decay, as a fraction of lr
  // wsd only: the length and the shape of the decay. The length is decay_steps if set, else decay_ratio * total_steps,
  // rounded.
  std::optional<int64_t> decay_steps = std::nullopt;
  double decay_ratio = 0.1;
  std::string decay_type = "cosine";  // linear, cosine, 1-sqrt
};

class Schedule {
 public:
  // Error kConfig: unknown name or decay type, negative counts, ratios outside [0, 1], or a wsd whose warm-up and decay
  // together are longer than the run.
  explicit Schedule(ScheduleOptions options);
  double at(int64_t step) const;

 private:
  ScheduleOptions options_;
  int64_t decay_start_ = 0;
};

}  // namespace tessera::optim
