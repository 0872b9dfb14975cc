// `tessera ckpt` on small files that the tests make. tests/models has the tests of the conversions.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>

#include "tessera/base/files/file.h"
#include "tessera/formats/gguf/gguf_writer.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/formats/torch/crc32.h"
#include "tessera/formats/torch/dcp_metadata.h"
#include "tessera/formats/torch/torch_save_writer.h"
#include "tests/models/stored_tensors.h"
#include "tests/models/tiny.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::program;
using testing::run_process;
using testing::TempFolder;

void write_safetensors(const std::filesystem::path& dir, const at::Tensor& second) {
  SafetensorsFolderWriter writer(dir, {{"a", at::kBFloat16, {2, 3}}, {"b", at::kFloat, {4}}}, {.max_shard_bytes = 12});
  writer.write("a", at::ones({2, 3}, at::kBFloat16));
  writer.write("b", second);
  writer.finish();
}

TEST(Ckpt, ListsEveryTensorOfAFolderAndOfAGgufFile) {
  TempFolder folder;
  write_safetensors(folder.path(), at::ones({4}));
  GgufWriter writer(folder / "m.gguf");
  writer.announce("w", GgmlType::kQ8_0, {2, 32});
  writer.write("w", at::ones({2, 32}));
  writer.finish();
  const auto text = run_process({program(), "ckpt", "ls", folder.path().string()});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("2 tensors, 28 bytes\n"));
  const auto shards = run_process({program(), "ckpt", "ls", folder.path().string(), "--json"});
  EXPECT_EQ(json::parse(shards.out), json::parse(R"({"tensors": [
              {"name": "a", "dtype": "BF16", "shape": [2, 3], "bytes": 12, "file": "model-00001-of-00002.safetensors"},
              {"name": "b", "dtype": "F32", "shape": [4], "bytes": 16, "file": "model-00002-of-00002.safetensors"}],
              "total_bytes": 28})"));
  const auto gguf = run_process({program(), "ckpt", "ls", (folder / "m.gguf").string(), "--json"});
  EXPECT_EQ(json::parse(gguf.out), json::parse(R"({"tensors": [
              {"name": "w", "dtype": "Q8_0", "shape": [2, 32], "bytes": 68, "file": "m.gguf"}], "total_bytes": 68})"));
}

TEST(Ckpt, VerifyAcceptsValidFilesAndNamesANonFiniteTensor) {
  TempFolder good, bad;
  write_safetensors(good.path(), at::ones({4}));
  write_safetensors(bad.path(), at::full({4}, std::numeric_limits<float>::quiet_NaN()));
  const auto fine = run_process({program(), "ckpt", "verify", good.path().string()});
  EXPECT_EQ(fine.exit_code, 0) << fine.err;
  EXPECT_THAT(fine.out, HasSubstr("2 tensors, 28 bytes, all good"));
  const auto broken = run_process({program(), "ckpt", "verify", bad.path().string()});
  EXPECT_EQ(broken.exit_code, 3);
  EXPECT_THAT(broken.err, HasSubstr("tensor 'b' holds values that are not finite"));
}

TEST(Ckpt, VerifyEscapesHostileNames) {
  TempFolder folder;
  const std::string name = "\x1b[31m\u202e\n" + std::string(200'000, 'n');
  SafetensorsFolderWriter writer(folder.path(), {{name, at::kFloat, {1}}});
  writer.write(name, at::full({1}, std::numeric_limits<float>::quiet_NaN()));
  writer.finish();
  const auto run = run_process({program(), "ckpt", "verify", folder.path().string()});
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_LT(run.out.size() + run.err.size(), size_t{2'000});
  EXPECT_THAT(run.out + run.err, AllOf(Not(HasSubstr("\x1b")), Not(HasSubstr("\u202e"))));
  EXPECT_THAT(run.err, HasSubstr("tensor '\\x1b[31m\\u202e\\nnnn"));
}

TEST(Ckpt, VerifyReportsWhichChecksumsWereCompared) {
  TempFolder folder;
  std::filesystem::create_directory(folder / "hf");
  write_safetensors(folder / "hf", at::ones({4}));
  const auto dcp = folder / "dcp";
  ASSERT_EQ(
      run_process({program(), "ckpt", "convert", (folder / "hf").string(), dcp.string(), "--to", "dcp"}).exit_code, 0);
  const auto verify = [&](const std::filesystem::path& path) {
    const auto run = run_process({program(), "ckpt", "verify", path.string()});
    return run.exit_code == 0 ? run.out : fmt::format("exit code {}: {}", run.exit_code, run.err);
  };
  EXPECT_THAT(verify(folder / "hf"), HasSubstr("all good; the format has no checksums"));
  EXPECT_THAT(verify(dcp), HasSubstr("all good; it has no hashes, so the checksums of its records were compared"));
  // A writer that computes no checksums stores zeros in their place.
  auto bytes = read_file(dcp / "__0_0.distcp");
  const auto ones = at::ones({4});
  const uint32_t crc = crc32(0, std::as_bytes(std::span(ones.const_data_ptr<float>(), 4)));
  const std::string sum(reinterpret_cast<const char*>(&crc), sizeof crc);
  int found = 0;
  for (size_t at = 0; (at = bytes.find(sum, at)) != bytes.npos; ++found) {
    bytes.replace(at, sum.size(), sum.size(), '\0');
  }
  ASSERT_EQ(found, 2) << "beside the data and in the directory";
  publish_file(dcp / "__0_0.distcp", bytes);
  EXPECT_THAT(verify(dcp), AllOf(HasSubstr("the values of 1 records were not checked"), Not(HasSubstr("all good"))));
  // A checkpoint of a run must have a manifest, so here its absence is an error.
  std::filesystem::rename(dcp, folder / "step-00000004");
  EXPECT_THAT(verify(folder / "step-00000004"), HasSubstr("not checked"));
  publish_file(folder / "LATEST", "step-00000004\n");
  for (const auto& path : {folder / "step-00000004", folder / "step-00000004/", folder.path()}) {
    EXPECT_THAT(verify(path), AllOf(HasSubstr("exit code 3"), HasSubstr("manifest.json is missing"))) << path;
  }
}

TEST(Ckpt, VerifyComparesNamesAndShapesWithTheConfig) {
  TempFolder folder;
  const auto verify = [&](const std::filesystem::path& path) {
    const auto run = run_process({program(), "ckpt", "verify", path.string()});
    return fmt::format("exit code {}: {}{}", run.exit_code, run.out, run.err);
  };
  // Saves a tiny model, applies `change` to its tensors, and verifies the folder.
  const auto verify_changed = [&](const std::string& config, const auto& change) {
    const auto dir = folder / "m";
    std::filesystem::remove_all(dir);
    save_pretrained(*testing::tiny_model(config), dir, {});
    auto tensors = testing::stored_tensors(dir);
    change(tensors);
    testing::store_tensors(dir, tensors);
    return verify(dir);
  };
  const auto untied = std::string(R"("tie_word_embeddings": false)"),
             tied = std::string(R"("tie_word_embeddings": true)");
  const auto bad = [](const char* what) {
    return AllOf(HasSubstr("exit code 3"), HasSubstr(what), Not(HasSubstr("good")));
  };
  EXPECT_THAT(verify_changed(untied, [](auto&) {}),
              AllOf(HasSubstr("exit code 0"), HasSubstr("; names and shapes are those of its config.json")));
  EXPECT_THAT(verify_changed(untied, [](auto& tensors) { tensors.erase("model.layers.1.mlp.up_proj.weight"); }),
              bad("model.layers.1.mlp.up_proj.weight is missing"));
  EXPECT_THAT(verify_changed(untied,
                             [](auto& tensors) {
                               tensors["model.embed_tokens.weight"] = at::ones({38, 16});
                             }),
              bad("model.embed_tokens.weight: saved [38, 16], model wants [37, 16]"));
  EXPECT_THAT(verify_changed(untied, [](auto& tensors) { tensors.erase("lm_head.weight"); }),
              bad("lm_head.weight is missing"));
  EXPECT_THAT(verify_changed(tied,
                             [](auto& tensors) {
                               tensors["lm_head.weight"] = at::ones({37, 16});
                             }),
              bad("model.embed_tokens.weight and lm_head.weight are one parameter"));
  EXPECT_THAT(verify_changed(R"("hidden_size": 16)", [](auto&) {}), HasSubstr("exit code 0"));
  publish_file(folder / "m" / "adapter_config.json", "{}");
  EXPECT_THAT(verify(folder / "m"), bad("an adapter of it"));
  std::filesystem::remove(folder / "m" / "adapter_config.json");
  const auto config = read_file(folder / "m" / "config.json");
  publish_file(folder / "m" / "config.json", R"({"architectures": ["MambaForCausalLM"]})");
  EXPECT_THAT(verify(folder / "m"), AllOf(HasSubstr("exit code 0"),
                                          HasSubstr("names and shapes were not compared with a model's: this version "
                                                    "has no model of the architecture 'MambaForCausalLM'")));
  publish_file(folder / "m" / "config.json", "{");
  EXPECT_THAT(verify(folder / "m"), bad("config.json"));
  auto impossible = json::parse(config);
  impossible["hidden_size"] = -1;
  publish_file(folder / "m" / "config.json", impossible.dump());
  EXPECT_THAT(verify(folder / "m"), bad("hidden_size: found -1"));
  std::filesystem::remove(folder / "m" / "config.json");
  EXPECT_THAT(verify(folder / "m"),
              AllOf(HasSubstr("exit code 0"), HasSubstr("were not compared with a model's: it holds "
                                                        "no config.json")));
}

// Writes a GGUF file of one tensor "w" with 256 values of the GGUF type `type`.
void write_gguf_of(const std::filesystem::path& path, uint32_t type, size_t data_bytes) {
  std::string text = "GGUF";
  const auto put = [&](auto value) { text.append(reinterpret_cast<const char*>(&value), sizeof value); };
  put(uint32_t{3});
  put(uint64_t{1});
  put(uint64_t{0});
  put(uint64_t{1});
  text += "w";
  put(uint32_t{1});
  put(uint64_t{256});
  put(type);
  put(uint64_t{0});
  text.resize((text.size() + 31) / 32 * 32);
  publish_file(path, text + std::string(data_bytes, '\0'));
}

TEST(Ckpt, VerifyReportsTensorsThatItCouldNotRead) {
  TempFolder folder;
  write_gguf_of(folder / "m.gguf", 10, 84);  // Q2_K
  const auto run = run_process({program(), "ckpt", "verify", (folder / "m.gguf").string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("the values of 1 tensors were not checked"), HasSubstr("1 of Q2_K"),
                             Not(HasSubstr("all good"))));
}

TEST(Ckpt, ListingEscapesAndShortensHostileNames) {
  TempFolder folder;
  std::vector<SafetensorsSpec> specs;
  for (int i = 0; i < 1000; ++i) specs.push_back({"t" + std::to_string(i), at::kFloat, {1}});
  specs.push_back({"\x1b[31m\u202e" + std::string(200'000, 'n'), at::kFloat, {1}});
  SafetensorsFolderWriter writer(folder.path(), specs);
  for (const auto& spec : specs) writer.write(spec.name, at::ones({1}));
  writer.finish();
  const auto run = run_process({program(), "ckpt", "ls", folder.path().string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_LT(run.out.size(), size_t{300'000}) << "padded to the longest name";
  EXPECT_THAT(run.out, AllOf(Not(HasSubstr("\x1b")), Not(HasSubstr("\u202e")), HasSubstr("\\x1b[31m\\u202ennn")));
}

TEST(Ckpt, DiffReportsDifferingTensorsAndTheLargestDifference) {
  TempFolder first, second;
  write_safetensors(first.path(), at::ones({4}));
  auto other = at::ones({4});
  other[2] = 1.5;
  write_safetensors(second.path(), other);
  const auto same = run_process({program(), "ckpt", "diff", first.path().string(), first.path().string()});
  EXPECT_EQ(same.exit_code, 0) << same.err;
  EXPECT_EQ(same.out, "2 tensors are equal, 0 differ\n");
  const auto differ = run_process({program(), "ckpt", "diff", first.path().string(), second.path().string()});
  EXPECT_EQ(differ.exit_code, 1) << differ.err;
  EXPECT_EQ(differ.out, "b: 1 elements differ, at most by 0.5, 0.5 of the largest\n1 tensors are equal, 1 differ\n");
}

TEST(Ckpt, SubcommandHelpShowsUsageAndArguments) {
  const auto run = run_process({program(), "ckpt", "verify", "--help"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("Usage: tessera ckpt verify [OPTIONS] PATH"), HasSubstr("a run's folder")));
}

// Writes a checkpoint with two tensors at these paths of the state dict.
void write_dcp_of_paths(const std::filesystem::path& folder, const DcpPath& first, const DcpPath& second) {
  DcpMetadata metadata;
  const DcpTensor one{.size = {1}, .chunks = {{{0}, {1}}}};
  metadata.entries = {{"a", one}, {"b", one}};
  metadata.planner_data = {{{"a", first}, {"b", second}}};
  std::string records;
  for (const char* name : {"a", "b"}) {
    const auto offset = records.size();
    write_tensor_record(at::ones({1}), [&](std::span<const std::byte> bytes) {
      records.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    });
    metadata.storage_data.push_back({{name, {{0}}, 0}, {"__0_0.distcp", offset, records.size() - offset}});
  }
  std::ofstream(folder / ".metadata", std::ios::binary) << metadata.dump();
  std::ofstream(folder / "__0_0.distcp", std::ios::binary) << records;
}

TEST(Ckpt, ConvertRefusesInvalidStateDictPaths) {
  const struct {
    DcpPath first, second;
    const char* message;
  } cases[] = {
      {{"m"}, {"m", "w"}, "contradict each other, at 'm'"},
      {{"m", "w"}, {"m", int64_t{0}}, "contradict each other, at 'm.0'"},
      {DcpPath(100'000, "m"), {"n"}, "a path of 100000 parts"},
  };
  for (const auto& [first, second, message] : cases) {
    TempFolder folder;
    write_dcp_of_paths(folder.path(), first, second);
    const auto out = folder / "out.pt";
    const auto run = run_process({program(), "ckpt", "convert", folder.path().string(), out.string(), "--to", "torch"});
    EXPECT_EQ(run.exit_code, 3) << run.err;
    EXPECT_THAT(run.err, HasSubstr(message));
    EXPECT_FALSE(std::filesystem::exists(out));
  }
}

TEST(Ckpt, UsageErrorsExitWithTwoAndMissingFilesWithThree) {
  TempFolder folder;
  write_safetensors(folder.path(), at::ones({4}));
  const auto dir = folder.path().string();
  const struct {
    std::vector<std::string> arguments;
    int exit_code;
    const char* message;
  } cases[] = {
      {{"convert", dir, dir + "/x", "--to", "onnx"}, 2, "wanted hf, gguf, dcp or torch"},
      {{"convert", dir, dir + "/x", "--to", "torch"}, 2, "needs a distributed checkpoint"},
      {{"convert", dir, dir + "/x", "--to", "dcp", "--dtype", "bf16"}, 2, "keeps the dtypes"},
      {{"convert", dir, dir + "/x", "--to", "torch", "--dtype", "bf16"}, 2, "keeps the dtypes"},
      {{"convert", dir, dir + "/x", "--to", "gguf", "--config", dir}, 2, "can be used only with --to hf and --to dcp"},
      {{"convert", dir, dir + "/x", "--to", "hf", "--config", dir}, 2, "holds no config.json"},
      {{"reshard", dir, dir + "/x", "--ranks", "2"}, 3, "holds neither manifest.json nor .metadata"},
      {{"reshard", dir, dir + "/x"}, 2, "--ranks"},
      {{"diff", dir, dir + "/missing"}, 3, "does not exist"},
      {{"convert", dir, dir + "/x", "--dtype", "q4_k"}, 2, "--dtype q4_k"},
      {{"ls"}, 2, "PATH"},
      {{}, 2, "A subcommand is required"},
      {{"verfy", dir}, 2, "unknown argument 'verfy'. Did you mean 'verify'? See"},
      {{"ls", dir + "/missing"}, 3, "does not exist"},
      {{"convert", dir, dir + "/x"}, 3, "config.json"},
  };
  for (const auto& [arguments, exit_code, message] : cases) {
    SCOPED_TRACE(message);
    std::vector<std::string> all = {program(), "ckpt"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const auto run = run_process(all);
    EXPECT_EQ(run.exit_code, exit_code) << run.err;
    EXPECT_THAT(run.err, HasSubstr(message));
    EXPECT_FALSE(std::filesystem::exists(folder / "x"));
  }
}

}  // namespace
}  // namespace tessera
