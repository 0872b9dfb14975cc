// Compares greedy generation with SmolLM2-135M at batch 1 and 8 with transformers: tokens/s of prompts (prefill) and of
// new tokens (decode). Decode is also compared with its roofline limit: the rate that this machine's memory bandwidth
// and GEMM rate allow. Both are measured in the same rounds. The tokens must equal those of transformers in float32,
// with weights rounded to our storage format.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <memory>

#include "bench/harness.h"
#include "tessera/base/files/file.h"
#include "tessera/models/generation/engine.h"
#include "tessera/models/generation/load.h"
#include "tessera/text/tokenizer.h"

namespace tessera::bench {
namespace {

constexpr int64_t kPromptTokens = 128, kNewTokens = 48;

using Tokens = std::vector<std::vector<int64_t>>;

struct Generated {
  double prompt_seconds = 0, decode_seconds = 0;
  Tokens tokens;
};

// Generates with a new engine, so that it has no cached pages of an earlier call.
Generated generate_all(const std::shared_ptr<CausalLM>& model, const Tokens& prompts, int64_t new_tokens) {
  const auto count = static_cast<int64_t>(prompts.size());
  Engine engine(
      model, {.pages = count * Engine::pages_for(kPromptTokens + new_tokens), .prompt_block = count * kPromptTokens});
  Generated generated{.tokens = Tokens(prompts.size())};
  for (size_t i = 0; i < prompts.size(); ++i) {
    engine.add({.prompt = prompts[i],
                .options = {.max_new_tokens = new_tokens},
                .on_token = [&to = generated.tokens[i]](const NewToken& token) {
                  if (token.error) throw Error(*token.error);
                  to.push_back(token.token);
                  return true;
                }});
  }
  generated.prompt_seconds = seconds_of([&] { engine.step(); });
  generated.decode_seconds = seconds_of([&] {
    while (engine.step()) {
    }
  });
  return generated;
}

// Returns prompts from the held-out text.
Tokens prompts_of(int64_t count) {
  const auto tokenizer = text::Tokenizer::from_folder(assets_folder() / "smollm2");
  const auto ids = tokenizer.encode(read_file(assets_folder() / "text" / "kjv-late.txt").substr(0, 1 << 16));
  Tokens prompts;
  for (int64_t i = 0; i < count; ++i) {
    const auto from = ids.begin() + i * kPromptTokens;
    prompts.emplace_back(from, from + kPromptTokens);
  }
  return prompts;
}

// Returns the memory bandwidth in bytes per second: reads and writes of a copy on all threads.
double copy_bandwidth() {
  constexpr int64_t kBytes = int64_t{256} << 20;
  static const at::Tensor from = at::ones({kBytes}, at::kByte), to = at::ones({kBytes}, at::kByte);
  const auto copy = [] {
    at::parallel_for(0, kBytes, 1 << 20, [](int64_t begin, int64_t end) {
      std::memcpy(to.data_ptr<uint8_t>() + begin, from.const_data_ptr<uint8_t>() + begin,
                  static_cast<size_t>(end - begin));
    });
  };
  return 2.0 * kBytes * 3 / seconds_of([&] {
           for (int i = 0; i < 3; ++i) copy();
         });
}

// Returns the FLOP/s of a large GEMM.
double gemm_peak() {
  constexpr int64_t kSize = 1536;
  static const at::Tensor a = at::rand({kSize, kSize}), b = at::rand({kSize, kSize});
  return 2.0 * kSize * kSize * kSize * 3 / seconds_of([] {
           for (int i = 0; i < 3; ++i) at::mm(a, b);
         });
}

struct DecodeCost {
  double flops = 0;  // of the matrix products, per token
  double bytes = 0;  // of the weights that a step reads
};

DecodeCost decode_cost(const ModelConfig& c, const std::string& dtype) {
  static const std::map<std::string, std::pair<double, double>> bytes = {// bytes per element: layers, head
                                                                         {"float32", {4, 4}},
                                                                         {"bfloat16", {2, 2}},
                                                                         {"int8", {1, 1}},
                                                                         {"int4", {0.625, 1}}};
  const double hidden = static_cast<double>(c.hidden_size);
  const double heads = static_cast<double>((2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim);
  const double layers =
      static_cast<double>(c.num_hidden_layers) * hidden * (heads + 3 * static_cast<double>(c.intermediate_size));
  const double head = static_cast<double>(c.vocab_size) * hidden;
  const auto [layer_bytes, head_bytes] = bytes.at(dtype);
  return {.flops = 2 * (layers + head), .bytes = layers * layer_bytes + head * head_bytes};
}

class Comparison {
 public:
  Comparison(Harness& harness, std::string dtype) : harness_(harness), dtype_(std::move(dtype)) {}

  void run(int64_t batch) {
    const auto name = [&](const std::string& measured) {
      return dtype_ + ", batch " + std::to_string(batch) + ", " + measured;
    };
    const bool prefill = harness_.is_selected(name("prefill")), decode = harness_.is_selected(name("decode")),
               limit = harness_.is_selected(name("decode vs. roofline limit"));
    if (!prefill && !decode && !limit) return;
    const auto prompts = prompts_of(batch);
    if (!model_) model_ = load_for_generation(folder(), dtype_ == "float32" ? "" : dtype_, at::kCPU);
    const Json request = {{"prompts", prompts}, {"new", kNewTokens}};
    const auto expected = Peer("generate.py", {folder(), "float32", dtype_}).ask(request)["tokens"].get<Tokens>();
    bool same = true;
    const auto ours = [&](int64_t new_tokens) {
      auto generated = generate_all(model_, prompts, new_tokens);
      for (size_t i = 0; i < expected.size(); ++i) {
        same &= generated.tokens[i] == std::vector(expected[i].begin(), expected[i].begin() + new_tokens);
      }
      return generated;
    };
    const double decoded_tokens = static_cast<double>(batch * (kNewTokens - 1));
    const auto our_decode = [&] { return decoded_tokens / ours(kNewTokens).decode_seconds; };
    const auto verified = [&] { return same; };
    const double prompt_tokens = static_cast<double>(batch * kPromptTokens);
    harness_.threads = at::get_num_threads();
    if (prefill || decode) start_peers();
    const auto peer_rate = [&](Peer& peer, int64_t new_tokens, const char* time_key, double tokens) {
      return tokens / peer.ask({{"prompts", prompts}, {"new", new_tokens}})[time_key].get<double>();
    };
    const Json extra = {{"peer_is", "transformers in " + peer_dtype()}};
    if (prefill) {
      harness_.run({.name = name("prefill"),
                    .unit = "tokens/s",
                    .verified = verified,
                    .ours = [&] { return prompt_tokens / ours(1).prompt_seconds; },
                    .peer = [&] { return peer_rate(*peer_, 1, "prompt_seconds", prompt_tokens); },
                    .tuned_peer = [&] { return peer_rate(*tuned_, 1, "prompt_seconds", prompt_tokens); },
                    .extra = extra});
    }
    if (decode) {
      harness_.run({.name = name("decode"),
                    .unit = "tokens/s",
                    .at_least = batch == 1 ? 3.0 : 4.0,
                    .verified = verified,
                    .ours = our_decode,
                    .peer = [&] { return peer_rate(*peer_, kNewTokens, "decode_seconds", decoded_tokens); },
                    .tuned_peer = [&] { return peer_rate(*tuned_, kNewTokens, "decode_seconds", decoded_tokens); },
                    .extra = extra});
    }
    if (!limit) return;
    const auto cost = decode_cost(model_->config(), dtype_);
    harness_.run({.name = name("decode vs. roofline limit"),
                  .unit = "tokens/s",
                  .at_least = 0.85,
                  .verified = verified,
                  .ours = our_decode,
                  .peer =
                      [&] {
                        const double rows = static_cast<double>(batch);
                        return rows / std::max(cost.bytes / copy_bandwidth(), rows * cost.flops / gemm_peak());
                      },
                  .extra = {{"weight_bytes", cost.bytes}, {"flops_per_token", cost.flops}}});
  }

 private:
  std::string folder() const { return (assets_folder() / "smollm2").string(); }
  std::string peer_dtype() const { return dtype_ == "float32" ? dtype_ : "bfloat16"; }
  void start_peers() {
    if (peer_) return;
    peer_ = std::make_unique<Peer>("generate.py", std::vector{folder(), peer_dtype(), std::string("generate")});
    tuned_ = std::make_unique<Peer>("generate.py", std::vector{folder(), peer_dtype(), std::string("loop")},
                                    Peer::Environment{{"LD_PRELOAD", "libtcmalloc_minimal.so.4"}});
  }

  Harness& harness_;
  std::string dtype_;
  std::shared_ptr<CausalLM> model_;
  std::unique_ptr<Peer> peer_, tuned_;
};

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("generate", [&] {
    Harness harness("generate", argc, argv);
    for (const char* dtype : {"float32", "bfloat16", "int8", "int4"}) {
      Comparison comparison(harness, dtype);
      for (const int64_t batch : {1, 8}) comparison.run(batch);
    }
    return harness.exit_code();
  });
}
