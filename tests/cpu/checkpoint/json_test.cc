// The JSON scanner and tree, files, and the errors of the getters.
#include "base/json.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/file.h"
#include "base/utf8.h"
#include "checkpoint_writer.h"

namespace moekit {
namespace {

TEST(Json, ReadsEveryKindOfValue) {
  const Json json = Json::parse(
      R"( {"a":[1,-2.5,1e3,true,false,null],"s":"q\"\\\u00e9\ud83d\ude00","n":{"deep":9007199254740993}} )",
      "t");
  const auto& a = json.find("a")->elements();
  ASSERT_EQ(a.size(), 6u);
  EXPECT_TRUE(a[0].number().is_integer);
  EXPECT_EQ(a[1].number().real, -2.5);
  EXPECT_FALSE(a[2].number().is_integer);
  EXPECT_TRUE(a[3].boolean());
  EXPECT_EQ(a[5].kind(), Json::Kind::null);
  EXPECT_EQ(json.find("s")->string(), "q\"\\\xc3\xa9\xf0\x9f\x98\x80");
  EXPECT_EQ(json.find("n")->find("deep")->number().integer, 9007199254740993);
}

TEST(Json, TakesPythonsInfinityAndNaN) {
  const Json json = Json::parse("[NaN, Infinity, -Infinity]", "t");
  EXPECT_TRUE(std::isnan(json.elements()[0].number().real));
  EXPECT_EQ(json.elements()[2].number().real, -INFINITY);
}

TEST(Json, RefusesMalformedText) {
  for (const char* text :
       {"",          "{",      "[1,]",    "{\"a\":1,}", "{a:1}", "01",          "1.",          "-",
        "1e",        "\"\n\"", "\"\\x\"", "tru",        "[1] 2", "\"\\ud800\"", "\"\\udc00\"", "+1",
        "{\"a\" 1}", "'a'",    "\"abc",   "\"\\u12"}) {
    expect_error([&] { Json::parse(text, "file.json"); }, "corrupt_file", {"file.json", "byte"});
  }
}

// RFC 3629, table 3-7 of Unicode: the edges of every row.
const std::vector<std::string> kMalformedUtf8 = {
    "\xff",
    "\x80",
    "\xbf",
    "\xc0\x80",
    "\xc1\xbf",
    "\xc2",
    "\xc2\x7f",
    "\xc2\xc0",
    "\xe0\x9f\xbf",
    "\xe2\x82",
    "\xe2\x82\x41",
    "\xed\xa0\x80",
    "\xed\xbf\xbf",
    "\xf0\x8f\xbf\xbf",
    "\xf0\x9f\x98",
    "\xf0\x9f\x98\x41",
    "\xf4\x90\x80\x80",
    "\xf5\x80\x80\x80",
    "\xf8\x88\x80\x80\x80",
};

TEST(Json, RefusesWhatIsNoUtf8ByItsByte) {
  for (const std::string& bytes : kMalformedUtf8) {
    char name[16];
    std::snprintf(name, sizeof name, "0x%02x", static_cast<unsigned char>(bytes[0]));
    SCOPED_TRACE(name);
    const std::vector<std::string> message = {"file.json", "at byte 4", "UTF-8", name, "fetch"};
    auto refused = [&](const std::string& text) {
      expect_error([&] { Json::parse(text, "file.json"); }, "corrupt_file", message);
      auto skip = [&] {
        JsonScanner scanner(text, "file.json");
        scanner.skip_value();
      };
      expect_error(skip, "corrupt_file", message);
    };
    refused("[\"ab" + bytes + "\"]");         // a value
    refused("{\"ab" + bytes + "\":1}");       // a name
    refused("[\"\xc3\xa9" + bytes + "c\"]");  // behind what is well-formed
  }
  expect_error([] { Json::parse("[1,\xff]", "f"); }, "corrupt_file", {"at byte 3", "0xff"});
  expect_error([] { Json::parse("\xef\xbb\xbf{}", "f"); }, "corrupt_file", {"at byte 0", "0xef"});
}

TEST(Json, TakesEveryWellFormedSequence) {
  for (const std::string text : {"\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xec\x80\x80",
                                 "\xed\x9f\xbf", "\xee\x80\x80", "\xef\xbf\xbf", "\xf0\x90\x80\x80",
                                 "\xf3\xbf\xbf\xbf", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(utf8_sequence(text + "tail"), text.size());
    const Json json = Json::parse("[\"a" + text + "\\n" + text + "\"]", "f");
    EXPECT_EQ(json.elements()[0].string(), "a" + text + "\n" + text);
  }
  EXPECT_EQ(utf8_sequence(""), 0u);
}

TEST(Json, ErrorsSayWhatCame) {
  auto expect = [](const char* text, const char* came) {
    expect_error([&] { Json::parse(text, "f"); }, "corrupt_file",
                 {"expected", "came", came, "fetch it again"});
  };
  expect("[1 2]", "'2'");
  expect("[1", "the end of the text");
  expect("[\"\n\"]", "byte 0x0a");
}

TEST(PrintableText, HidesControlsAndBrokenBytes) {
  EXPECT_EQ(printable_text("plain \xc3\xa9 \xf0\x9f\x98\x80"), "plain \xc3\xa9 \xf0\x9f\x98\x80");
  EXPECT_EQ(printable_text("a\x1b[31m\x7f\t\n\r"), "a\\x1b[31m\\x7f\\t\\n\\x0d");
  EXPECT_EQ(printable_text(std::string("\0", 1)), "\\x00");
  EXPECT_EQ(printable_text("\xc2\x9b"
                           "1m\xc2\xa0"),
            "\\xc2\\x9b"
            "1m\xc2\xa0");  // C1: CSI
  for (const std::string& bytes : kMalformedUtf8) {
    for (const char c : printable_text(bytes)) EXPECT_GE(c, 0x20) << bytes.size();
  }
}

TEST(Json, NamesRepeatedKeys) {
  expect_error([] { Json::parse(R"({"a":{"k":1,"k":2}})", "f"); }, "corrupt_file",
               {"f", "duplicate", "\"k\""});
}

TEST(Json, BoundsDepth) {
  const std::string deep(100000, '[');
  expect_error([&] { Json::parse(deep, "f"); }, "corrupt_file", {"nested"});
}

TEST(JsonPlace, ErrorsNamePathExpectedAndCame) {
  const Json json =
      Json::parse(R"({"a":{"b":"text","n":-1,"f":2.5,"w":8.0,"z":null,"l":[1]}})", "c.json");
  const JsonPlace root(json, "c.json");
  expect_error([&] { root.at("a").at("b").as_int(); }, "corrupt_file", {"c.json: a.b", "\"text\""});
  expect_error([&] { root.at("a").at("n").as_int(1, 5); }, "corrupt_file", {"1 to 5", "-1"});
  expect_error([&] { root.at("a").at("f").as_int(); }, "corrupt_file", {"2.5"});
  expect_error([&] { root.at("x").at("y").as_int(); }, "corrupt_file", {"x.y", "missing"});
  expect_error([&] { root.at("a").at("l").at("q"); }, "corrupt_file", {"object"});
  EXPECT_EQ(root.at("a").at("w").as_int(), 8);
  EXPECT_FALSE(root.at("a").at("z").present());
  EXPECT_EQ(root.at("a").at("z").int_or(0, 9, 7), 7);
}

TEST(Files, AtomicWriteReplacesOrLeavesNothing) {
  const TempDir dir;
  write_file_atomically(dir.file("f"), "one");
  write_file_atomically(dir.file("f"), "two");
  EXPECT_EQ(read_file(dir.file("f"), 100), "two");
  {
    AtomicFile abandoned(dir.file("g"));
    abandoned.write("partial");
  }
  EXPECT_FALSE(is_file(dir.file("g")));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
  expect_error([&] { write_file_atomically(dir.file("no/such/dir"), "x"); }, "invalid_argument",
               {"no/such/dir"});
}

TEST(Files, CapsAndKindsAreChecked) {
  const TempDir dir;
  put_text(dir.file("f"), "12345");
  expect_error([&] { read_file(dir.file("f"), 4); }, "corrupt_file", {"at most 4", "5"});
  expect_error([&] { read_file(dir.path(), 4); }, "corrupt_file", {"regular file"});
  expect_error([&] { MappedFile(dir.file("none"), ErrorCode::invalid_argument); },
               "invalid_argument", {"none"});
  put_text(dir.file("e"), "");
  EXPECT_EQ(MappedFile(dir.file("e")).size(), 0);
}

}  // namespace
}  // namespace moekit
