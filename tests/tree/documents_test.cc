// Tests of the documents: their links lead to existing files and headings, and README's C++ example is part of a
// program that runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <functional>

#include "tessera/base/files/file.h"
#include "tests/support/process.h"
#include "tests/tree/source_tree.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace fs = std::filesystem;

std::string without_indent(const std::string& line) {
  const auto begin = line.find_first_not_of(' ');
  return begin == std::string::npos ? "" : line.substr(begin);
}

// The anchors that GitHub gives to the headings of a page: lower case, hyphens for spaces, no punctuation.
std::set<std::string> anchors_of(const std::string& text) {
  std::set<std::string> anchors;
  for (const auto& line : lines_of(text)) {
    if (!line.starts_with("#")) continue;
    std::string anchor;
    for (const char c : without_indent(line.substr(line.find_first_not_of('#')))) {
      if (std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_') {
        anchor += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      } else if (c == ' ') {
        anchor += '-';
      }
    }
    anchors.insert(anchor);
  }
  return anchors;
}

// The links of the pages whose file or heading does not exist. `exists` says whether a path from the root exists.
std::vector<std::string> link_faults(const SourceTree& pages, const std::function<bool(const std::string&)>& exists) {
  std::vector<std::string> faults;
  for (const auto& [path, text] : pages) {
    for (const auto& link : matches(text, R"(\]\(([^)\s]+)\))", /*group=*/1)) {
      if (link.find("://") != std::string::npos) continue;
      const auto hash = link.find('#');
      const auto file = link.substr(0, hash);
      const auto target = file.empty() ? path : (fs::path(path).parent_path() / file).lexically_normal().string();
      const auto page = pages.find(target);
      if (!exists(target)) {
        faults.push_back(path + ": the link " + link + " leads to no file");
      } else if (hash != std::string::npos && page != pages.end() &&
                 !anchors_of(page->second).contains(link.substr(hash + 1))) {
        faults.push_back(path + ": the link " + link + " leads to no heading");
      }
    }
  }
  return faults;
}

// The lines of a page's C++ examples that `program` does not have in the same order. Indentation is ignored.
std::vector<std::string> example_faults(const std::string& page, const std::string& program) {
  const auto program_lines = lines_of(program);
  auto next = program_lines.begin();
  std::vector<std::string> faults;
  bool in_example = false;
  for (const auto& line : lines_of(page)) {
    if (line.starts_with("```")) {
      in_example = line == "```cpp";
      continue;
    }
    if (!in_example) continue;
    const auto found = std::find_if(next, program_lines.end(), [&](const std::string& other) {
      return without_indent(other) == without_indent(line);
    });
    if (found == program_lines.end()) {
      faults.push_back(line);
    } else {
      next = found + 1;
    }
  }
  return faults;
}

TEST(Documents, LinksLeadToFilesAndHeadings) {
  auto pages = read_tree(source_folder(), {"docs", "bench/results", "examples", "tests"}, {".md"});
  for (const char* name : {"README.md", "HACKING.md", "CONTRIBUTING.md", "CHANGELOG.md"}) {
    pages[name] = read_file(source_folder() / name);
  }
  EXPECT_GT(pages.size(), 30U);
  EXPECT_THAT(link_faults(pages, [](const std::string& path) { return fs::exists(source_folder() / path); }),
              IsEmpty());
  const auto only_pages = [](const std::string& path) { return path.ends_with(".md"); };
  EXPECT_THAT(link_faults({{"docs/a.md", "[x](b.md#two-words) [y](c.cc) [z](#gone)"}, {"docs/b.md", "## Two words!"}},
                          only_pages),
              ElementsAre(HasSubstr("c.cc leads to no file"), HasSubstr("#gone leads to no heading")));
}

TEST(Documents, ReadmeExampleIsPartOfAProgram) {
  const auto page = read_file(source_folder() / "README.md");
  const auto program = read_file(source_folder() / "examples/custom_loop/main.cc");
  EXPECT_THAT(page, HasSubstr("fully_shard("));
  EXPECT_THAT(example_faults(page, program), IsEmpty());
  EXPECT_THAT(example_faults("```cpp\nb();\na();\n```\n", "  a();\n  b();\n"), ElementsAre("a();"));
}

}  // namespace
}  // namespace tessera::testing
