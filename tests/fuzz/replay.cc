// Runs a fuzz target on files, without libFuzzer: 'replay_fuzz_inputs TARGET FOLDER...' runs every file of the folders,
// one after the other.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <vector>

// fuzz_targets.inc holds TARGET(NAME) for every NAME_fuzz.cc.
#define TARGET(name) extern "C" int fuzz_##name(const uint8_t* data, size_t size);
#include "fuzz_targets.inc"
#undef TARGET

namespace {

struct Target {
  std::string_view name;
  int (*run)(const uint8_t* data, size_t size);
};

constexpr Target kTargets[] = {
#define TARGET(name) {#name, fuzz_##name},
#include "fuzz_targets.inc"
#undef TARGET
};

int replay(const Target& target, int folders, char** folder) {
  int inputs = 0;
  for (int i = 0; i < folders; ++i) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder[i])) {
      if (!entry.is_regular_file()) continue;
      std::printf("%s\n", entry.path().c_str());  // printed before the run, so that a crash names its input
      std::fflush(stdout);
      std::ifstream file(entry.path(), std::ios::binary);
      const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
      target.run(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      ++inputs;
    }
  }
  std::printf("%d inputs\n", inputs);
  return inputs > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  for (const auto& target : kTargets) {
    if (argc > 2 && target.name == argv[1]) return replay(target, argc - 2, argv + 2);
  }
  std::fprintf(stderr, "usage: replay_fuzz_inputs TARGET FOLDER...\ntargets:");
  for (const auto& target : kTargets) std::fprintf(stderr, " %s", target.name.data());
  std::fprintf(stderr, "\n");
  return 2;
}
