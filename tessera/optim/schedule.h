// The learning rate of each step: linear warm-up, then cosine or linear decay to a floor, or constant.
//
//   optim::Schedule schedule({.name = "cosine", .lr = 1e-4, .warmup_steps = 10, .total_steps = 100, .min_lr_ratio =
//   0.1}); optimizer->set_lr(schedule.at(step));      // step counts from 0
//
// Step t of T with W warm-up steps has lr * (t + 1) / W while t < W (as torchtitan; step 0 learns already), then the
// values of transformers' get_{linear,cosine}_schedule_with_warmup and cosine_with_min_lr at t: with
// p = (t - W) / (T - W), lr * (r + (1 - r) * (1 + cos(pi p)) / 2) or lr * (r + (1 - r) * (1 - p)). Step W has the full
// rate, steps from T on the floor r * lr. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::optim {

struct ScheduleOptions {
  std::string name = "cosine";  // cosine, linear, constant
  double lr = 1e-4;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;
  double min_lr_ratio = 0;  // the floor of the decay, as a part of lr
};

class Schedule {
 public:
  // Error kConfig: unknown name, negative counts, ratio outside [0, 1].
  explicit Schedule(ScheduleOptions options);
  double at(int64_t step) const;

 private:
  ScheduleOptions options_;
};

}  // namespace tessera::optim
