// Compares `tessera serve` with llama.cpp's server on one GGUF file of SmolLM2-135M: tokens/s that 1 and 8 clients get
// over HTTP, prompts included. The greedy texts must agree up to rounding, which differs more for narrow weights; a
// field of the line has the share of the texts before they diverge.
// A further case measures how long 8 clients of `tessera serve` wait for their answers next to hostile clients,
// compared with their wait without hostile clients. The texts must be the same.
#include <algorithm>
#include <filesystem>
#include <memory>

#include "bench/harness.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/scratch_folder.h"
#include "tessera/base/machine/host.h"
#include "tessera/models/gguf/gguf_convert.h"
#include "tests/serve/hostile_requests.h"

namespace tessera::bench {
namespace {

constexpr int64_t kNewTokens = 64;
constexpr size_t kPromptBytes = 400;  // about 100 tokens

using Texts = std::vector<std::string>;

// Returns pieces of the held-out text. Each round gets other pieces, so that no server has them in its cache.
Texts prompts_of(size_t count, size_t round) {
  static const std::string text = read_file(assets_folder() / "text" / "kjv-late.txt").substr(0, 1 << 20);
  Texts prompts;
  for (size_t i = 0; i < count; ++i) {
    const size_t from = text.find(' ', (round * count + i) * kPromptBytes % (text.size() - 2 * kPromptBytes)) + 1;
    prompts.push_back(text.substr(from, text.find(' ', from + kPromptBytes) - from));
  }
  return prompts;
}

// The share of the text of one server that the other server's text has too, up to the first difference.
struct Agreement {
  size_t same = 0, all = 0;
  void add(const Texts& a, const Texts& b) {
    for (size_t i = 0; i < a.size(); ++i) {
      same +=
          static_cast<size_t>(std::mismatch(a[i].begin(), a[i].end(), b[i].begin(), b[i].end()).first - a[i].begin());
      all += a[i].size();
    }
  }
  double share() const { return static_cast<double>(same) / static_cast<double>(all); }
};

struct File {
  std::string name;
  GgmlType type;
  std::string dtype;       // our storage format of the weights
  double least_agreement;  // low for Q8_0, which has a scale per 32 numbers; our int8 has one per row
};

void compare(Harness& harness, const File& file, size_t clients) {
  const auto name = file.name + ", " + std::to_string(clients) + (clients == 1 ? " client" : " clients");
  if (!harness.wants(name)) return;
  const ScratchFolder scratch("bench.serve");
  const auto path = (scratch / "model.gguf").string();
  folder_to_gguf(assets_folder() / "smollm2", path, {.type = file.type});
  Peer ours("serve.py", {"tessera", path, file.dtype});
  Peer theirs("serve.py", {"llama.cpp", path, std::to_string(clients)});
  struct Half {
    Peer& server;
    size_t round = 0;
    Texts texts{};
  };
  Half our_half{ours}, their_half{theirs};
  Agreement agreement;
  const auto speed = [&](Half& half, const Half& other) {
    const auto answer = half.server.ask({{"prompts", prompts_of(clients, half.round++)}, {"new", kNewTokens}});
    half.texts = answer["texts"].get<Texts>();
    if (half.round == other.round) agreement.add(half.texts, other.texts);
    return static_cast<double>(clients * kNewTokens) / answer["seconds"].get<double>();
  };
  const Json extra = {{"peer_is", "llama.cpp in the wheel xllamacpp, built for AVX2"}, {"ours_in", file.dtype}};
  Case what{.name = name,
            .unit = "tokens/s",
            .verified = nullptr,
            .ours = [&] { return speed(our_half, their_half); },
            .peer = [&] { return speed(their_half, our_half); },
            .extra = extra};
  what.verified = [&] {
    what.extra["agreement"] = agreement.share();
    return agreement.share() > file.least_agreement;
  };
  harness.threads = static_cast<int>(usable_cores());
  harness.run(what);
}

// Measures the delay next to the hostile clients of tests/serve/hostile_requests.h and 256 connections that send
// nothing.
void measure_delay(Harness& harness) {
  constexpr size_t kClients = 8;
  const std::string name = "delay beside hostile clients, 8 clients";
  if (!harness.wants(name)) return;
  const ScratchFolder scratch("bench.serve");
  const auto path = (scratch / "model.gguf").string(), file = (scratch / "hostile.jsonl").string();
  folder_to_gguf(assets_folder() / "smollm2", path, {.type = GgmlType::kQ8_0});
  std::string lines;
  for (const auto& request : testing::hostile_requests()) {
    lines += Json({{"path", request.path}, {"body", request.body}}).dump() + "\n";
  }
  publish_file(file, lines);
  Peer beside_hostile("serve.py", {"tessera", path, "int8"}), alone("serve.py", {"tessera", path, "int8"});
  Texts hostile_texts, lone_texts;
  bool is_same = true;
  size_t hostile_round = 0, lone_round = 0;
  const auto milliseconds = [&](Peer& server, const std::string& hostile, size_t& round, Texts& texts) {
    auto answer = server.ask({{"prompts", prompts_of(kClients, round++)}, {"new", kNewTokens}, {"hostile", hostile}});
    texts = answer["texts"].get<Texts>();
    if (hostile_round == lone_round) is_same = is_same && hostile_texts == lone_texts;
    return answer["delay"].get<double>() * 1000;
  };
  harness.threads = static_cast<int>(usable_cores());
  harness.run({.name = name,
               .unit = "ms",
               .higher_is_better = false,
               .verified = [&] { return is_same; },
               .ours = [&] { return milliseconds(beside_hostile, file, hostile_round, hostile_texts); },
               .peer = [&] { return milliseconds(alone, "", lone_round, lone_texts); },
               .extra = {{"peer_is", "the same server without hostile clients"}}});
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  using tessera::GgmlType;
  return bench_main("serve", [&] {
    Harness harness("serve", argc, argv);
    for (const File& file :
         {File{"F32", GgmlType::kF32, "float32", 0.8}, File{"BF16", GgmlType::kBF16, "bfloat16", 0.8},
          File{"Q8_0", GgmlType::kQ8_0, "int8", 0.1}}) {
      for (const size_t clients : {1, 8}) compare(harness, file, clients);
    }
    measure_delay(harness);
    return harness.exit_code();
  });
}
