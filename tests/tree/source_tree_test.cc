// Tests that the source tree keeps the rules of HACKING.md, and that the check of each rule finds a tree that breaks
// the rule.
#include "tests/tree/source_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/files/file.h"
#include "tests/support/process.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const SourceTree& our_tree() {
  static const SourceTree tree = read_tree(source_folder(), {"tessera"}, {".h", ".cc", ".cu", ".cuh"});
  return tree;
}

const std::map<std::string, std::set<std::string>>& our_layers() {
  static const auto layers = layers_of(read_file(source_folder() / "CMakeLists.txt"));
  return layers;
}

TEST(SourceTree, FilesAndLayersAreRead) {
  EXPECT_GT(our_tree().size(), 1000U);
  EXPECT_EQ(our_layers().size(), 19U);
  EXPECT_THAT(our_layers().at("data"), ElementsAre("base", "data", "text"));
}

TEST(SourceTree, LayersIncludeOnlyDeclaredLayers) {
  EXPECT_THAT(layer_faults(our_tree(), our_layers()), IsEmpty());
  EXPECT_THAT(layer_faults({{"tessera/data/a.cc", "#include \"tessera/nn/module.h\"\n"}}, our_layers()),
              ElementsAre(HasSubstr("layer data does not use layer nn")));
  EXPECT_THAT(layer_faults({{"tessera/nn/a.h", "#pragma once\n#include \"tessera/dtensor.h\"\n"}}, our_layers()),
              ElementsAre(HasSubstr("public headers are for users")));
  EXPECT_THAT(layer_faults({{"tessera/new/a.cc", "#include \"tessera/base/error.h\"\n"}}, our_layers()),
              ElementsAre(HasSubstr("layer new does not use layer base")));
}

TEST(SourceTree, FoldersOfALayerDoNotIncludeEachOtherInCycles) {
  EXPECT_THAT(room_faults(our_tree()), IsEmpty());
  EXPECT_THAT(room_faults({{"tessera/nn/a/x.h", "#include \"tessera/nn/b/y.h\"\n"},
                           {"tessera/nn/b/y.cc", "#include \"tessera/nn/c/z.h\"\n"},
                           {"tessera/nn/c/z.cc", "#include \"tessera/nn/a/detail/x.h\"\n"}}),
              ElementsAre(HasSubstr("tessera/nn/c/z.cc includes tessera/nn/a/detail/x.h")));
}

TEST(SourceTree, DetailHeadersAreIncludedOnlyByTheirOwnFolder) {
  EXPECT_THAT(detail_faults(our_tree()), IsEmpty());
  EXPECT_THAT(detail_faults({{"tessera/nn/a.cc", "#include \"tessera/mesh/detail/cuda_graphs.h\"\n"}}),
              ElementsAre(HasSubstr("which is for tessera/mesh alone")));
}

TEST(SourceTree, NamespacesFollowFolders) {
  EXPECT_THAT(namespace_faults(our_tree()), IsEmpty());
  EXPECT_THAT(namespace_faults({{"tessera/nn/a.h", "namespace tessera::kernels {\n"}}),
              ElementsAre(HasSubstr("expected tessera::nn")));
  EXPECT_THAT(namespace_faults({{"tessera/mesh/a.h", "namespace tessera::detail {\n"}}),
              ElementsAre(HasSubstr("expected tessera")));
  EXPECT_THAT(namespace_faults({{"tessera/mesh/detail/a.h", "namespace tessera {\n"}}),
              ElementsAre(HasSubstr("expected tessera::detail")));
}

TEST(SourceTree, ExamplesIncludeOnlyPublicHeaders) {
  EXPECT_THAT(public_header_faults(read_tree(source_folder(), {"examples"}, {".cc", ".h"})), IsEmpty());
  EXPECT_THAT(public_header_faults({{"examples/a/main.cc", "#include <tessera/base/error.h>\n"}}),
              ElementsAre(HasSubstr("which may move")));
}

TEST(SourceTree, BracesFollowTheStyle) {
  EXPECT_THAT(brace_faults(read_tree(source_folder(), {"tessera", "tests", "bench", "examples"}, {".h", ".cc"})),
              IsEmpty());
  EXPECT_THAT(brace_faults({{"a.cc", "  if (a)\n    b();\n  c();\n"}}), ElementsAre(HasSubstr("a.cc:1: a body")));
  EXPECT_THAT(brace_faults({{"a.cc", "  } else\n    b();\n  c();\n"}}), ElementsAre(HasSubstr("a.cc:1: a body")));
  EXPECT_THAT(brace_faults({{"a.cc", "x();\nfor (;;) {\n  b();\n}\nc();\n"}}), ElementsAre(HasSubstr("a.cc:2: a st")));
}

}  // namespace
}  // namespace tessera::testing
