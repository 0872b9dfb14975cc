// Compares `tessera serve` with llama.cpp's server on one GGUF file of SmolLM2-135M: new tokens per second that 1 and 8
// clients get over HTTP, with the time for the prompts included. Greedy texts diverge at some point because of
// rounding, earlier for weights of fewer bits. The field "agreement" of the JSON line has the share of the texts before
// they diverge, which must exceed a limit. A further case measures the latency of 8 clients of `tessera serve` while
// hostile clients use the server, compared with their latency without hostile clients. The texts must be equal.
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

// Returns pieces of the held-out text. Each round gets new pieces, so that no server has them in its prefix cache.
Texts prompts_of(size_t count, size_t round) {
  static const std::string text = read_file(assets_folder() / "text" / "kjv-late.txt").substr(0, 1 << 20);
  Texts prompts;
  for (size_t i = 0; i < count; ++i) {
    const size_t from = text.find(' ', (round * count + i) * kPromptBytes % (text.size() - 2 * kPromptBytes)) + 1;
    prompts.push_back(text.substr(from, text.find(' ', from + kPromptBytes) - from));
  }
  return prompts;
}

// The share of the characters before the first difference between the texts of two servers.
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
  std::string dtype;     // our storage format of the weights
  double min_agreement;  // low for Q8_0, which has a scale per 32 numbers, while our int8 has a scale per row
};

void compare(Harness& harness, const File& file, size_t clients) {
  const auto name = file.name + ", " + std::to_string(clients) + (clients == 1 ? " client" : " clients");
  if (!harness.is_selected(name)) return;
  const ScratchFolder scratch("bench.serve");
  const auto path = (scratch / "model.gguf").string();
  folder_to_gguf(assets_folder() / "smollm2", path, {.type = file.type});
  Peer ours("serve.py", {"tessera", path, file.dtype});
  Peer peer("serve.py", {"llama.cpp", path, std::to_string(clients)});
  struct Server {
    Peer& process;
    size_t round = 0;
    Texts texts{};
  };
  Server our_server{ours}, peer_server{peer};
  Agreement agreement;
  const auto speed = [&](Server& server, const Server& other) {
    const auto answer = server.process.ask({{"prompts", prompts_of(clients, server.round++)}, {"new", kNewTokens}});
    server.texts = answer["texts"].get<Texts>();
    if (server.round == other.round) agreement.add(server.texts, other.texts);
    return static_cast<double>(clients * kNewTokens) / answer["seconds"].get<double>();
  };
  const Json extra = {{"peer_is", "llama.cpp in the wheel xllamacpp, built for AVX2"}, {"ours_in", file.dtype}};
  Case bench_case{.name = name,
                  .unit = "tokens/s",
                  .verified = nullptr,
                  .ours = [&] { return speed(our_server, peer_server); },
                  .peer = [&] { return speed(peer_server, our_server); },
                  .extra = extra};
  bench_case.verified = [&] {
    bench_case.extra["agreement"] = agreement.share();
    return agreement.share() > file.min_agreement;
  };
  harness.threads = static_cast<int>(usable_cores());
  harness.run(bench_case);
}

// Measures the mean latency while hostile clients send the requests of tests/serve/hostile_requests.h, and hold 256
// connections on which they send nothing.
void measure_latency(Harness& harness) {
  constexpr size_t kClients = 8;
  const std::string name = "latency with hostile clients, 8 clients";
  if (!harness.is_selected(name)) return;
  const ScratchFolder scratch("bench.serve");
  const auto path = (scratch / "model.gguf").string(), file = (scratch / "hostile.jsonl").string();
  folder_to_gguf(assets_folder() / "smollm2", path, {.type = GgmlType::kQ8_0});
  std::string lines;
  for (const auto& request : testing::hostile_requests()) {
    lines += Json({{"path", request.path}, {"body", request.body}}).dump() + "\n";
  }
  publish_file(file, lines);
  Peer with_hostile("serve.py", {"tessera", path, "int8"}), without_hostile("serve.py", {"tessera", path, "int8"});
  Texts hostile_texts, normal_texts;
  bool is_same = true;
  size_t hostile_round = 0, normal_round = 0;
  const auto milliseconds = [&](Peer& server, const std::string& hostile, size_t& round, Texts& texts) {
    auto answer = server.ask({{"prompts", prompts_of(kClients, round++)}, {"new", kNewTokens}, {"hostile", hostile}});
    texts = answer["texts"].get<Texts>();
    if (hostile_round == normal_round) is_same = is_same && hostile_texts == normal_texts;
    return answer["delay"].get<double>() * 1000;
  };
  harness.threads = static_cast<int>(usable_cores());
  harness.run({.name = name,
               .unit = "ms",
               .higher_is_better = false,
               .verified = [&] { return is_same; },
               .ours = [&] { return milliseconds(with_hostile, file, hostile_round, hostile_texts); },
               .peer = [&] { return milliseconds(without_hostile, "", normal_round, normal_texts); },
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
    measure_latency(harness);
    return harness.exit_code();
  });
}
