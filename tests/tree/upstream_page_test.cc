// Tests that every row of docs/upstream.md names an existing header, test and example, which contain the row's C++
// name.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/files/file.h"
#include "tests/support/process.h"
#include "tests/tree/source_tree.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::matches;

struct Source {
  std::set<std::string> words;  // identifiers, but not those of comments and preprocessor lines
  std::set<fs::path> includes;  // headers of this library
};

Source read_source(const fs::path& file) {
  Source source;
  std::string word, text = read_file(file) + std::string(10, '\n');
  for (size_t i = 0, line = 0; i < text.size(); ++i) {
    const bool directive = i == line && text[i] == '#';
    if (directive && text.compare(i + 10, 8, "tessera/") == 0) {  // the path after `#include "`
      source.includes.insert(testing::source_folder() /
                             text.substr(i + 10, text.find_first_of("\">", i + 10) - i - 10));
    }
    if (directive || text.compare(i, 2, "//") == 0) i = text.find('\n', i);
    if (text[i] == '\n') line = i + 1;
    if (std::isalnum(static_cast<unsigned char>(text[i])) || text[i] == '_') {
      word += text[i];
    } else if (!word.empty()) {
      source.words.insert(std::exchange(word, ""));
    }
  }
  return source;
}

class UpstreamPage : public ::testing::Test {
 protected:
  const Source& source(const fs::path& file) {
    const auto [entry, is_new] = sources_.try_emplace(file);
    if (is_new && fs::exists(file)) entry->second = read_source(file);
    return entry->second;
  }
  // `header` and the headers of this library that it includes, directly or indirectly.
  const std::set<fs::path>& included(const fs::path& header) {
    const auto [entry, is_new] = included_.try_emplace(header);
    auto& found = entry->second;
    std::vector<fs::path> next(is_new ? 1 : 0, header);
    while (!next.empty()) {
      const auto path = next.back();
      next.pop_back();
      if (found.insert(path).second) {
        next.insert(next.end(), source(path).includes.begin(), source(path).includes.end());
      }
    }
    return found;
  }
  std::map<fs::path, Source> sources_;
  std::map<fs::path, std::set<fs::path>> included_;
};

TEST_F(UpstreamPage, RowsNameExistingHeadersTestsAndExamples) {
  const fs::path root = testing::source_folder();
  const auto rows = matches(read_file(root / "docs/upstream.md"), "\n\\|[^\n]*\\.h`[^\n]*");
  EXPECT_GE(rows.size(), 250u);
  for (const auto& row : rows) {
    const auto cells = matches(row, "\\| ([^|]*) ", 1);  // upstream, ours, header, test, example, deviation
    ASSERT_GE(cells.size(), 5u) << row;
    const auto ours = matches(cells[1], "\\w+");  // each name has its namespace or class before it
    const auto declares = [&](const fs::path& file) {
      return std::all_of(ours.begin(), ours.end(), [&](const auto& part) { return source(file).words.contains(part); });
    };
    const fs::path header = root / "tessera" / cells[2].substr(1, cells[2].size() - 2), test = root / cells[3];
    EXPECT_TRUE(fs::exists(header)) << "no " << header << row;
    EXPECT_TRUE(std::ranges::any_of(included(header), declares)) << "not declared behind the header" << row;
    EXPECT_TRUE(source(test).words.contains(ours.back())) << "not in the test" << row;
    if (cells[4] == "—") continue;
    EXPECT_TRUE(source(root / "examples" / cells[4] / "main.cc").words.contains(ours.back())) << "no example" << row;
  }
}

}  // namespace
}  // namespace tessera
