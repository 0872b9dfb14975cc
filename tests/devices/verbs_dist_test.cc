// Tests the program's commands generate, score and serve on the pretend device against the CPU's tokens and scores.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <atomic>
#include <future>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tessera/cli/sharded_model.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/models/generation/engine.h"
#include "tessera/models/generation/load.h"
#include "tessera/serve/scheduler.h"
#include "tests/devices/pretend.h"
#include "tests/serve/tiny_folder.h"
#include "tests/support/http_client.h"
#include "tests/support/ranks.h"
#include "tests/train/tiny_run.h"

namespace tessera::cli {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using Arguments = std::vector<std::string>;

class PretendVerbs : public ::testing::Test {
 protected:
  // Returns the output lines of the command `verb` on a device.
  std::vector<json> lines(const std::string& verb, const std::string& device, int ranks, const Arguments& more) const {
    Arguments all = {device == "cpu" ? testing::program() : testing::pretend_program(),
                     verb,
                     "--model",
                     model(),
                     "--device",
                     device,
                     "--nproc",
                     std::to_string(ranks)};
    all.insert(all.end(), more.begin(), more.end());
    const auto run = testing::run_process(all);
    EXPECT_EQ(run.exit_code, 0) << verb << " on " << device << "\n" << run.err;
    std::vector<json> found;
    std::istringstream text(run.out);
    for (std::string line; std::getline(text, line);) found.push_back(json::parse(line));
    return found;
  }
  std::string file(const std::string& name, const std::string& content) const {
    publish_file(temp_ / name, content);
    return (temp_ / name).string();
  }
  std::string model() const { return folder_.path().string(); }

  testing::TinyFolder folder_;
  testing::TempFolder temp_;
};

TEST_F(PretendVerbs, GenerateGivesTheTokensOfTheCpu) {
  const Arguments batch = {"--batch", file("batch.jsonl", R"({"id": 1, "prompt": "the cat"}
{"id": 2, "prompt": "the cat sat on a mat, and a dog"}
{"id": 3, "prompt": "a"}
)"),
                           "--max-new-tokens", "12"};
  const auto wanted = lines("generate", "cpu", 1, batch);
  ASSERT_EQ(wanted.size(), 3);
  for (const int ranks : {1, 2}) EXPECT_EQ(lines("generate", "pretend", ranks, batch), wanted) << ranks;
  const auto one = lines("generate", "pretend", 1, {"--prompt", "the cat", "--max-new-tokens", "12", "--json"});
  ASSERT_EQ(one.size(), 1);
  EXPECT_EQ(one[0]["tokens"], wanted[0]["tokens"]);
}

TEST_F(PretendVerbs, ScoreGivesTheLogProbsOfTheCpu) {
  const Arguments input = {"--input", file("in.jsonl", R"({"text": "the cat sat on a mat"}
{"prompt": "ab", "choices": ["cde", "zzzzzz", "q"], "answer": 2}
)")};
  const auto logprobs = [](const json& line) {
    std::vector<double> all;
    const auto sequences = line.contains("choices") ? line["choices"] : json::array({line});
    for (const auto& sequence : sequences) {
      for (const double each : sequence["logprobs"]) all.push_back(each);
    }
    return all;
  };
  const auto wanted = lines("score", "cpu", 1, input);
  ASSERT_EQ(wanted.size(), 2);
  for (const int ranks : {1, 2}) {
    const auto found = lines("score", "pretend", ranks, input);
    ASSERT_EQ(found.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_THAT(logprobs(found[i]), ::testing::Pointwise(::testing::DoubleNear(1e-5), logprobs(wanted[i])))
          << ranks << " ranks";
    }
    EXPECT_EQ(found[1]["best"], wanted[1]["best"]);
  }
}

TEST_F(PretendVerbs, ServeGivesTheTextOfTheCpu) {
  const auto wanted = lines("generate", "cpu", 1, {"--prompt", "the cat", "--max-new-tokens", "12", "--json"});
  ASSERT_EQ(wanted.size(), 1);
  const auto log = (temp_ / "log").string();
  auto served = std::async(std::launch::async, [&] {
    return testing::run_process({"bash", "-c",
                                 "\"$1\" serve --model \"$2\" --port 0 --device pretend --nproc 2 2>\"$3\" & echo $! "
                                 ">\"$3.pid\"; wait $!",
                                 "-", testing::pretend_program(), model(), log});
  });
  const auto at = [&]() -> int {
    std::error_code none;
    const auto text = std::filesystem::exists(log, none) ? read_file(log) : "";
    const auto place = text.find("at http://127.0.0.1:");
    const bool whole = place != std::string::npos && text.find('\n', place) != std::string::npos;
    return whole ? std::stoi(text.substr(place + 20)) : 0;
  };
  const auto begun = [&] { return served.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout; };
  while (at() == 0 && begun()) {
  }
  EXPECT_NE(at(), 0);
  const auto reply = testing::http(at(), "POST", "/v1/completions",
                                   R"({"model": "tiny", "prompt": "the cat", "max_tokens": 12, "temperature": 0})");
  testing::run_process({"bash", "-c", "kill $(cat \"$1.pid\")", "-", log});
  const auto run = served.get();
  EXPECT_EQ(run.exit_code, 0) << read_file(log);
  EXPECT_THAT(read_file(log), HasSubstr("(pretend:0, "));
  ASSERT_EQ(reply.status, 200) << reply.body << read_file(log);
  EXPECT_EQ(json::parse(reply.body)["choices"][0]["text"], wanted[0]["text"]);
}

TEST(PretendDevice, IsReportedByDoctorAndByTrainCheck) {
  const auto doctor = testing::run_process({testing::pretend_program(), "doctor"});
  EXPECT_EQ(doctor.exit_code, 0) << doctor.err;
  EXPECT_THAT(doctor.out, HasSubstr("pretend, 8 visible"));
  const train::TinyRun runs;
  auto command = runs.command("checked", 2);
  command[0] = testing::pretend_program();
  command.emplace_back("--check");
  const auto check = testing::run_process(command);
  EXPECT_EQ(check.exit_code, 0) << check.err;
  EXPECT_THAT(check.out, HasSubstr("pretend, 8 visible"));
}

TEST_F(PretendVerbs, SchedulerThreadUsesTheModelsDevice) {
  const auto device = testing::pretend_device(3);
  const auto model = load_for_generation(folder_.path(), "", device);
  std::promise<c10::Device> seen;
  model->register_forward_pre_hook([&, told = false](nn::Module&, nn::TensorRefs&) mutable {
    if (!std::exchange(told, true)) seen.set_value(c10::impl::VirtualGuardImpl(device.type()).getDevice());
  });
  const auto tokenizer = text::Tokenizer::from_folder(folder_.path());
  serve::Scheduler scheduler(model, {.pages = 4}, {});
  const auto answer =
      scheduler.submit({.choices = {{.prompt = {19, 7, 4}, .options = {.max_new_tokens = 1}}}}, tokenizer);
  auto found = seen.get_future();
  ASSERT_EQ(found.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_EQ(found.get(), device);
}

// The pretend device's allocator, which reports the given number of free bytes on the first devices.
class AllocatorWithRoom final : public c10::DeviceAllocator {
 public:
  explicit AllocatorWithRoom(std::array<size_t, 2> free) : own_(c10::GetAllocator(c10::kPrivateUse1)), free_(free) {
    c10::SetAllocator(c10::kPrivateUse1, this);
  }
  ~AllocatorWithRoom() override { c10::SetAllocator(c10::kPrivateUse1, own_); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    EXPECT_TRUE(emptied_) << "what its cache holds is free, too";
    return {free_.at(static_cast<size_t>(device)), size_t{1} << 40};
  }
  c10::DataPtr allocate(size_t bytes) override { return own_->allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return own_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { own_->copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override {
    emptied_ = true;
    rest().emptyCache(pool);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { rest().recordStream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return rest().getDeviceStats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { rest().resetAccumulatedStats(device); }
  void resetPeakStats(c10::DeviceIndex device) override { rest().resetPeakStats(device); }

 private:
  c10::DeviceAllocator& rest() const { return dynamic_cast<c10::DeviceAllocator&>(*own_); }
  c10::Allocator* own_;
  std::array<size_t, 2> free_;
  std::atomic<bool> emptied_ = false;
};

TEST_F(PretendVerbs, CacheSizeFollowsTheDeviceWithTheLeastFreeMemory) {
  constexpr int64_t kMany = int64_t{1} << 40;
  const auto config = ModelConfig::from_folder(folder_.path());
  const int64_t page_bytes = Engine::page_bytes(config, /*element_bytes=*/2);  // bfloat16
  const auto whole = comm::World::single();
  const auto first = testing::pretend_device(0);
  const auto one = load_sharded_model(model(), "bfloat16", config, first, whole);
  EXPECT_EQ(shared_cache_tokens(*one, 512, *whole), std::max<int64_t>(512, config.max_position_embeddings))
      << "the device does not say: the host's memory bounds it";

  const AllocatorWithRoom room({static_cast<size_t>(page_bytes) * 400, static_cast<size_t>(page_bytes) * 40});
  EXPECT_EQ(shared_cache_tokens(*one, kMany, *whole), 300 * kernels::kPageTokens) << "three quarters";
  EXPECT_EQ(shared_cache_tokens(*one, 512, *whole), config.max_position_embeddings) << "a context of 256 pages";
  testing::run_ranks({.size = 2}, [&](const std::shared_ptr<comm::World>& world) {
    const auto device = comm::choose_device(*world, {.setting = "pretend"});
    const auto shared = load_sharded_model(model(), "bfloat16", config, device, world);
    EXPECT_EQ(shared_cache_tokens(*shared, kMany, *world), 60 * kernels::kPageTokens)
        << "of the second device, where a page has half of the heads";
  });
}

}  // namespace
}  // namespace tessera::cli
