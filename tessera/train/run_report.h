// Everything a run says about its steps: metrics.jsonl, TensorBoard, lines on stderr.
//
//   RunReport report(recipe, folder, config, world->size(), first_step, steps);   // rank 0 only
//   report.step(7, result, lr, seconds);
//   report.validation(20, loss, seconds);
//   report.finish(stopped_early);
//
// Writes recipe.yaml at once and drops metrics after first_step. Refers to the folder, which outlives it. Not
// thread-safe. Errors kIo (full disk) from every call.
#pragma once

#include <cstdint>
#include <memory>

namespace tessera {
struct ModelConfig;

namespace train {

struct Recipe;
struct StepResult;
class RunFolder;

class RunReport {
 public:
  // Measures the machine's matmul peak: about 0.2 s.
  RunReport(const Recipe& recipe, RunFolder& folder, const ModelConfig& config, int world_size, int64_t first_step,
            int64_t steps);
  ~RunReport();
  void step(int64_t step, const StepResult& result, double lr, double seconds);
  void validation(int64_t step, double loss, double seconds);
  void finish(bool stopped_early);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace train
}  // namespace tessera
