// Tests of resolve_model_path(): names of models in the Hub's cache, its environment variables, paths, and the errors
// for missing models.
#include "tessera/models/files/model_path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>

#include "tessera/base/error.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ModelPathTest : public ::testing::Test {
 protected:
  ModelPathTest() {
    for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"}) {
      const char* value = std::getenv(name);
      before_[name] = value ? std::optional<std::string>(value) : std::nullopt;
      ::unsetenv(name);
    }
    const auto model = folder_ / "home/hub/models--acme--tiny";
    write(model / "refs/main", "0123abc");
    write(model / "refs/v2", "4567def\n");
    write(model / "snapshots/0123abc/config.json", "{}");
    write(model / "snapshots/4567def/config.json", "{}");
    write(folder_ / "home/hub/models--gpt2/refs/main", "abc");
    write(folder_ / "home/hub/models--gpt2/snapshots/abc/config.json", "{}");
    ::setenv("HF_HOME", (folder_ / "home").c_str(), 1);
  }
  ~ModelPathTest() override {
    for (const auto& [name, value] : before_) {
      if (value) {
        ::setenv(name.c_str(), value->c_str(), 1);
      } else {
        ::unsetenv(name.c_str());
      }
    }
  }
  static void write(const std::filesystem::path& path, const std::string& content) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << content;
  }
  std::string snapshot(const std::string& name) {
    return (folder_ / "home/hub/models--acme--tiny/snapshots" / name).string();
  }
  std::string error_of(const std::string& name) {
    try {
      resolve_model_path(name, "model.path");
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      return error.what();
    }
    ADD_FAILURE() << "no error for " << name;
    return "";
  }

  testing::TempFolder folder_;
  std::map<std::string, std::optional<std::string>> before_;
};

TEST_F(ModelPathTest, NamesAreFoundInTheHubsCache) {
  EXPECT_EQ(resolve_model_path("acme/tiny", "model.path"), snapshot("0123abc"));
  EXPECT_EQ(resolve_model_path("acme/tiny@v2", "model.path"), snapshot("4567def"));
  EXPECT_EQ(resolve_model_path("acme/tiny@0123abc", "model.path"), snapshot("0123abc"));
  EXPECT_THAT(resolve_model_path("gpt2", "model.path"), HasSubstr("models--gpt2/snapshots/abc"));
}

TEST_F(ModelPathTest, HubEnvironmentVariablesAreUsed) {
  ::unsetenv("HF_HOME");
  ::setenv("HF_HUB_CACHE", (folder_ / "home/hub").c_str(), 1);
  EXPECT_EQ(resolve_model_path("acme/tiny", "model.path"), snapshot("0123abc"));
  ::unsetenv("HF_HUB_CACHE");
  std::filesystem::create_directories(folder_ / "user/.cache/huggingface");
  std::filesystem::create_directory_symlink(folder_ / "home/hub", folder_ / "user/.cache/huggingface/hub");
  ::setenv("HOME", (folder_ / "user").c_str(), 1);
  EXPECT_THAT(resolve_model_path("acme/tiny", "model.path"),
              HasSubstr("user/.cache/huggingface/hub/models--acme--tiny"));
}

TEST_F(ModelPathTest, ExistingFoldersTakePrecedenceAndOtherPathsAreUnchanged) {
  const auto was = std::filesystem::current_path();
  std::filesystem::current_path(folder_.path());
  write("acme/tiny/config.json", "{}");
  EXPECT_EQ(resolve_model_path("acme/tiny", "model.path"), "acme/tiny");
  std::filesystem::current_path(was);
  for (const char* name : {"/no/such/folder", "./acme/tiny", "a/b/c", "../x/y", "acme/ti ny", ""}) {
    EXPECT_EQ(resolve_model_path(name, "model.path"), name);
  }
}

TEST_F(ModelPathTest, MissingModelsReportTheDownloadCommand) {
  EXPECT_THAT(error_of("not-there"), HasSubstr("'hf download not-there'"));
  EXPECT_THAT(error_of("acme/other"),
              AllOf(HasSubstr("model.path: 'acme/other'"), HasSubstr((folder_ / "home/hub").string()),
                    HasSubstr("'hf download acme/other'")));
  EXPECT_THAT(error_of("acme/tiny@v3"), HasSubstr("'hf download acme/tiny --revision v3'"));
  std::filesystem::remove(snapshot("0123abc") + "/config.json");
  EXPECT_THAT(error_of("acme/tiny"), AllOf(HasSubstr("holds no config.json"), HasSubstr("hf download acme/tiny")));
  write(folder_ / "home/hub/models--acme--tiny/refs/main", "../../../../etc");
  EXPECT_THAT(error_of("acme/tiny"), HasSubstr("hf download"));
}

}  // namespace
}  // namespace tessera
