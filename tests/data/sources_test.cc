// Tests of the containers of data: JSON lines and arrays, gzip, folders and patterns of shards, and Megatron's file
// pairs; also of damaged files.
#include "tessera/data/records/sources.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/data/records/megatron.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

using tessera::testing::TempFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class Action>
std::string source_error(ErrorKind kind, Action action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("\n")));
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

std::string gzipped(const std::string& content) {
  z_stream stream{};
  EXPECT_EQ(::deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(::deflateBound(&stream, content.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
  stream.avail_in = static_cast<uInt>(content.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(::deflate(&stream, Z_FINISH), Z_STREAM_END);
  const auto written = static_cast<size_t>(stream.total_out);
  ::deflateEnd(&stream);
  return out.substr(0, written);
}

class SourcesTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& content) {
    std::filesystem::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return (folder_ / name).string();
  }
  // The text of each record, followed by its position in the file.
  std::vector<std::string> texts(const DataSource& source, const std::string& purpose = "train") {
    std::vector<std::string> found;
    for (const auto& file : files_of(source, purpose)) {
      read_records(file, source, [&](const TrainingRecord& record) {
        found.push_back(record.text + record.where.substr(file.path.string().size()));
      });
    }
    return found;
  }
  std::vector<std::string> names(const DataSource& source, const std::string& purpose = "train") {
    std::vector<std::string> found;
    for (const auto& file : files_of(source, purpose)) {
      found.push_back(std::filesystem::relative(file.path, folder_.path()).string());
    }
    return found;
  }
  std::string error_of(const DataSource& source, ErrorKind kind, const std::string& purpose = "train") {
    return source_error(kind, [&] { texts(source, purpose); });
  }

  TempFolder folder_;
};

TEST_F(SourcesTest, JsonArraysAreReadRecordByRecordWithPositions) {
  const auto path =
      write("a.json", "\xef\xbb\xbf [\n  {\"text\": \"a,]}\\\"\"},\n  {\"text\": \"\u00e9\"}, {\"text\": \"c\"}\n]\n");
  EXPECT_THAT(texts(path), ElementsAre("a,]}\" line 2 column 3", "\u00e9 line 3 column 3", "c line 3 column 18"));
  EXPECT_THAT(texts(write("empty.json", " [ ] ")), ElementsAre());
  EXPECT_THAT(texts(write("lines.json", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n")),
              ElementsAre("a line 1", "b line 2"));
}

TEST_F(SourcesTest, BrokenJsonArraysNameFileLineAndColumn) {
  const auto error = [&](const std::string& content) {
    return error_of(write("bad.json", content), ErrorKind::kFormat);
  };
  EXPECT_THAT(error("[{\"text\": \"a\"},\n {\"text\": oops}]"), HasSubstr("bad.json line 2 column 11: no valid JSON"));
  EXPECT_THAT(error("[{\"text\": \"a\"}\n {\"text\": \"b\"}]"),
              HasSubstr("line 2 column 2: no valid JSON: syntax error while parsing value - unexpected '{'"));
  EXPECT_THAT(error("[{\"text\": \"a\"},\n ]"), HasSubstr("line 2 column 2: found a comma before the end"));
  EXPECT_THAT(error("[{\"text\": \"a\"},\n {\"text\": \"b"),
              AllOf(HasSubstr("line 2 column 13: the file ends inside of the record"), HasSubstr("line 2 column 2")));
  EXPECT_THAT(error("[{\"text\": \"a\"}"),
              HasSubstr("line 1 column 15: the file ends inside of the record that begins at line 1 column 2"));
  EXPECT_THAT(error("[{\"text\": \"a\"}] x"), HasSubstr("found 'x', wanted nothing behind the array"));
  EXPECT_THAT(error("[5]"), AllOf(HasSubstr("line 1 column 2"), HasSubstr("the record is 5, wanted a JSON object")));
  EXPECT_THAT(error("[{\"txt\": \"a\"}]"), AllOf(HasSubstr("line 1 column 2"), HasSubstr("'txt'")));
  EXPECT_THAT(error("[" + std::string(100'000, '{')), HasSubstr("the file ends"));
  EXPECT_THAT(error("[{\"text\": " + std::string(1000, '[') + std::string(1000, ']') + "}]"),
              HasSubstr("nested deeper"));
}

TEST_F(SourcesTest, GzipIsRecognisedByItsBytesAndReadInMembers) {
  const std::string one = "{\"text\": \"a\"}\n", two = "{\"text\": \"b\"}\n";
  EXPECT_THAT(texts(write("a.jsonl.gz", gzipped(one) + gzipped(two) + std::string(100, '\0'))),
              ElementsAre("a line 1", "b line 2"));
  EXPECT_THAT(texts(write("named.jsonl", gzipped(one))), ElementsAre("a line 1"));
  EXPECT_THAT(texts(write("a.json.gz", gzipped("[" + one + "]"))), ElementsAre("a line 1 column 2"));
  EXPECT_THAT(texts(write("a.txt.gz", gzipped("verse"))), ElementsAre("verse"));
  const auto whole = gzipped(one + two + std::string(10'000, ' '));
  EXPECT_THAT(error_of(write("cut.jsonl.gz", whole.substr(0, whole.size() - 5)), ErrorKind::kFormat),
              AllOf(HasSubstr("cut.jsonl.gz: cut off after"), HasSubstr("inside of gzip")));
  auto flipped = whole;
  flipped[flipped.size() - 6] ^= 1;  // a byte of the checksum
  EXPECT_THAT(error_of(write("flipped.jsonl.gz", flipped), ErrorKind::kFormat), HasSubstr("damaged gzip"));
  EXPECT_THAT(error_of(write("behind.jsonl.gz", gzipped(one) + "junk"), ErrorKind::kFormat), HasSubstr("damaged gzip"));
}

TEST_F(SourcesTest, DecompressedRecordsAreLimitedInSize) {
  const auto path = write("bomb.jsonl.gz", gzipped("{\"text\": \"" + std::string(size_t{258} << 20, 'a') + "\"}\n"));
  EXPECT_LT(std::filesystem::file_size(path), size_t{1} << 20);
  EXPECT_THAT(error_of(path, ErrorKind::kFormat), AllOf(HasSubstr("line 1"), HasSubstr("within 256 MiB")));
}

TEST_F(SourcesTest, LargeTextsAreReadInPartsThatJoinToTheFullText) {
  std::string text;
  for (int line = 0; text.size() < size_t{36} << 20; ++line) text += fmt::format("line {} of \u00e9\n", line);
  std::string joined;
  int parts = 0;
  bool first = true, last = false;
  const auto path = write("a.txt", text);
  read_records({path, DataContainer::kText}, {}, [&](const TrainingRecord& part) {
    EXPECT_EQ(part.first, first);
    EXPECT_FALSE(last);
    EXPECT_TRUE(part.last || part.text.back() == '\n');
    first = false, last = part.last;
    joined += part.text;
    ++parts;
  });
  EXPECT_EQ(parts, 3);
  EXPECT_TRUE(last);
  EXPECT_TRUE(joined == text);
}

TEST_F(SourcesTest, EncodingIsCheckedAcrossBuffers) {
  std::string text(size_t{1} << 20, 'a');
  text.replace(text.size() - 1, 1, "\u20ac");  // the bytes of this character lie on both sides of the first MiB
  EXPECT_THAT(texts(write("a.txt", text)), ElementsAre(text));
  text += "\xe9 la";
  EXPECT_THAT(error_of(write("b.txt", text), ErrorKind::kFormat),
              AllOf(HasSubstr(fmt::format("byte {} is 0xe9", text.size() - 4)), HasSubstr("Latin-1")));
}

TEST_F(SourcesTest, FoldersGiveTheFilesOfASplit) {
  for (const char* name :
       {"data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/validation-00000-of-00001.jsonl",
        "data/train_sft-00000-of-00001.jsonl", "README.md", "dataset_infos.json", ".cache/train.jsonl"}) {
    write(std::string("hub/") + name, "{\"text\": \"a\"}\n");
  }
  const auto hub = (folder_ / "hub").string();
  EXPECT_THAT(names(hub), ElementsAre("hub/data/train-00000-of-00002.jsonl", "hub/data/train-00001-of-00002.jsonl"));
  EXPECT_THAT(names(hub, "validation"), ElementsAre("hub/data/validation-00000-of-00001.jsonl"));
  EXPECT_THAT(names({hub, {.split = "train_sft"}}), ElementsAre("hub/data/train_sft-00000-of-00001.jsonl"));
  EXPECT_THAT(error_of({hub, {.split = "test"}}, ErrorKind::kConfig),
              AllOf(HasSubstr("no split 'test'"), HasSubstr("train, train_sft, validation")));
  std::filesystem::remove(folder_ / "hub/data/train-00000-of-00002.jsonl");
  EXPECT_THAT(error_of(hub, ErrorKind::kFormat), AllOf(HasSubstr("train-00000-of-00002"), HasSubstr("is missing")));
}

TEST_F(SourcesTest, FoldersWithoutSplitNamesAreReadAndSeveralSetsRefused) {
  write("by_folder/train/x.jsonl", "{\"text\": \"a\"}\n");
  write("by_folder/valid/x.jsonl", "{\"text\": \"b\"}\n");
  EXPECT_THAT(texts((folder_ / "by_folder").string()), ElementsAre("a line 1"));
  EXPECT_THAT(texts((folder_ / "by_folder").string(), "validation"), ElementsAre("b line 1"));
  write("plain/1.jsonl", "{\"text\": \"a\"}\n");
  write("plain/2.jsonl.gz", gzipped("{\"text\": \"b\"}\n"));
  EXPECT_THAT(texts((folder_ / "plain").string()), ElementsAre("a line 1", "b line 1"));
  EXPECT_THAT(texts((folder_ / "plain").string(), "validation"), ElementsAre("a line 1", "b line 1"));
  write("several/en/train.jsonl", "{\"text\": \"a\"}\n");
  write("several/de/train.jsonl", "{\"text\": \"b\"}\n");
  EXPECT_THAT(error_of((folder_ / "several").string(), ErrorKind::kConfig),
              AllOf(HasSubstr("several data sets"), HasSubstr("several/de and"), HasSubstr("several/en")));
  write("kinds/a.jsonl", "{\"text\": \"a\"}\n");
  write("kinds/b.txt", "b");
  EXPECT_THAT(error_of((folder_ / "kinds").string(), ErrorKind::kConfig),
              AllOf(HasSubstr("a.jsonl is JSON lines"), HasSubstr("b.txt is text")));
  std::filesystem::create_directories(folder_ / "none");
  EXPECT_THAT(error_of((folder_ / "none").string(), ErrorKind::kIo), HasSubstr("holds no data"));
}

TEST_F(SourcesTest, PatternsGiveTheirFilesInOrder) {
  write("w/b-2.jsonl", "{\"text\": \"b\"}\n");
  write("w/b-1.jsonl", "{\"text\": \"a\"}\n");
  write("w/c-1.jsonl", "{\"text\": \"c\"}\n");
  EXPECT_THAT(texts((folder_ / "w/b-*.jsonl").string()), ElementsAre("a line 1", "b line 1"));
  EXPECT_THAT(texts((folder_ / "w/{b,c}-1.jsonl").string()), ElementsAre("a line 1", "c line 1"));
  EXPECT_THAT(error_of((folder_ / "w/d*").string(), ErrorKind::kIo), HasSubstr("no file name matches this pattern"));
  EXPECT_THAT(error_of((folder_ / "w/none.jsonl").string(), ErrorKind::kIo), HasSubstr("no such file or folder"));
}

// The file that Megatron's preprocess_data.py writes, byte for byte: header, lengths, pointers and bounds of documents.
template <class Id>
struct MegatronFiles {
  std::string index, ids;
  MegatronFiles(const std::vector<std::vector<Id>>& sequences, const std::vector<int64_t>& bounds, uint8_t code) {
    const auto put = [](std::string& to, auto value) {
      to.append(reinterpret_cast<const char*>(&value), sizeof(value));
    };
    index = std::string("MMIDIDX\0\0", 9);
    put(index, uint64_t{1});
    put(index, code);
    put(index, static_cast<uint64_t>(sequences.size()));
    put(index, static_cast<uint64_t>(bounds.size()));
    for (const auto& one : sequences) put(index, static_cast<int32_t>(one.size()));
    int64_t pointer = 0;
    for (const auto& one : sequences) {
      put(index, pointer);
      pointer += static_cast<int64_t>(one.size() * sizeof(Id));
      for (const Id id : one) put(ids, id);
    }
    for (const int64_t bound : bounds) put(index, bound);
  }
};

TEST_F(SourcesTest, MegatronTokenIdsAreReadByDocumentInBothDtypes) {
  const auto check = [&](const auto& files, int32_t largest) {
    write("c_text_document.idx", files.index);
    write("c_text_document.bin", files.ids);
    for (const char* name : {"c_text_document", "c_text_document.bin", "c_text_document.idx", "c_text_document.*"}) {
      std::vector<std::vector<int32_t>> documents;
      const DataSource source((folder_ / name).string());
      const auto found = files_of(source, "train");
      ASSERT_EQ(found.size(), 1u) << name;
      read_records(found[0], source, [&](const TrainingRecord& record) {
        EXPECT_EQ(record.kind, RecordKind::kTokens);
        documents.push_back(record.tokens);
      });
      EXPECT_THAT(documents, ElementsAre(ElementsAre(1, 2, 3, largest), ElementsAre(), ElementsAre(5))) << name;
    }
  };
  check(MegatronFiles<uint16_t>({{1, 2}, {3, 65535}, {5}}, {0, 2, 2, 3}, 8), 65535);
  check(MegatronFiles<int32_t>({{1, 2}, {3, 200'000}, {5}}, {0, 2, 2, 3}, 4), 200'000);
}

TEST_F(SourcesTest, InvalidMegatronFilePairsAreRefused) {
  const MegatronFiles<uint16_t> good({{1, 2}, {3}}, {0, 1, 2}, 8);
  const auto error = [&](const std::string& index, const std::string& ids) {
    write("m.idx", index);
    write("m.bin", ids);
    return source_error(ErrorKind::kFormat, [&] { MegatronIndex::open(folder_ / "m.idx"); });
  };
  const auto changed = [&](size_t at, char value) {
    auto index = good.index;
    index[at] = value;
    return index;
  };
  EXPECT_THAT(error(good.index, good.ids.substr(0, 4)),
              AllOf(HasSubstr("m.bin: 4 bytes"), HasSubstr("m.idx describes 6")));
  EXPECT_THAT(error(good.index, good.ids + "x"), HasSubstr("m.bin: 7 bytes"));
  EXPECT_THAT(error(good.index.substr(0, good.index.size() - 1), good.ids), HasSubstr("do not hold exactly"));
  EXPECT_THAT(error(good.index.substr(0, 20), good.ids), HasSubstr("is not an index of Megatron"));
  EXPECT_THAT(error(changed(0, 'X'), good.ids), HasSubstr("is not an index of Megatron"));
  EXPECT_THAT(error(changed(9, 2), good.ids), HasSubstr("found version 2, wanted 1"));
  EXPECT_THAT(error(changed(17, 6), good.ids), HasSubstr("ids of type 6"));
  EXPECT_THAT(error(changed(25, 0x7f), good.ids), HasSubstr("do not hold exactly"));  // the number of sequences
  EXPECT_THAT(error(changed(34, 1), good.ids), HasSubstr("sequence 1 has 1 ids at byte 4, wanted 0 or more at byte 2"));
  EXPECT_THAT(error(changed(34 + 8 + 16, 1), good.ids), HasSubstr("document 0 begins at sequence 1"));
  EXPECT_THAT(error(changed(34 + 8 + 16 + 8, 3), good.ids), HasSubstr("document 1 begins at sequence 3"));
  write("alone.idx", good.index);
  EXPECT_THAT(source_error(ErrorKind::kIo, [&] { MegatronIndex::open(folder_ / "alone"); }), HasSubstr("alone.bin"));
  const MegatronFiles<int32_t> negative({{-1}}, {0, 1}, 4);
  write("n.idx", negative.index);
  write("n.bin", negative.ids);
  EXPECT_THAT(source_error(ErrorKind::kFormat, [&] { MegatronIndex::open(folder_ / "n").document(0); }),
              AllOf(HasSubstr("n.bin document 0"), HasSubstr("found the token -1")));
}

}  // namespace
}  // namespace tessera::data
