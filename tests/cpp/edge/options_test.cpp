// SPDX-License-Identifier: Apache-2.0
#include "diffulex/edge/options.h"

#include <algorithm>
#include <clocale>
#include <cstdio>
#include <fstream>
#include <locale>
#include <string>

#include <gtest/gtest.h>

#include "core/json_reader.h"
#include "diffulex/edge/read_number.h"
#include "json_text.h"

namespace diffulex::test {
namespace {

/// Settings of a model, as Python writes them.
const std::string& conf() {
  static const Json file = Json::load(DIFFULEX_TEST_DATA_DIR "/edge/session_cases.json");
  return file.items().at(0).at("conf").as_string();
}

std::string with(const std::string& line, const std::string& other) {
  std::string text = conf();
  const size_t begin = text.find(line);
  EXPECT_NE(begin, std::string::npos) << line;
  return text.replace(begin, line.size(), other);
}

std::string message_of(const std::string& text) {
  return EdgeOptions::parse(text).status().message();
}

TEST(EdgeOptions, ReadsWhatPythonWrites) {
  const Result<EdgeOptions> read = EdgeOptions::parse(conf());
  ASSERT_TRUE(read.ok()) << read.status().message();
  const EdgeOptions& options = read.value();
  EXPECT_EQ(options.engine.strategy, "multi_bd");
  EXPECT_EQ(options.engine.block_size, 8);
  EXPECT_EQ(options.engine.max_model_len, 160);
  EXPECT_EQ(options.engine.stop_token_ids, (std::vector<int32_t>{636, 638}));
  EXPECT_EQ(options.engine.thresholds.semi_complete, 0.9F);
  EXPECT_EQ(options.sampler.acceptance_rule, AcceptRule::kDynamic);
  EXPECT_EQ(options.sampler.filter_order, FilterOrder::kTopKFirst);
  EXPECT_EQ(options.sampler.forbidden_token_ids, (std::vector<int64_t>{639}));
  EXPECT_TRUE(options.sampler.demote_token_ids.empty());
  EXPECT_EQ(options.sampler.vocab_limit, 640);
}

TEST(EdgeOptions, ReadsTextsWithTheirEscapes) {
  const Result<EdgeOptions> read = EdgeOptions::parse(
      with("template_before = \"\"", "template_before = \" \\\"a\\\\b\\n=\\r# \""));
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read.value().prompt.before, " \"a\\b\n=\r# ");
}

TEST(EdgeOptions, NamesTheLineOrTheKeyThatIsWrong) {
  EXPECT_EQ(message_of(with("block_size = 8", "block_size 8")),
            "session options: expected key = value, got \"block_size 8\" in line 3");
  EXPECT_EQ(message_of(conf() + "seed = 1\n"),
            "session options: expected seed once, got it again in line " +
                std::to_string(std::count(conf().begin(), conf().end(), '\n') + 1));
  EXPECT_EQ(message_of(with("block_size = 8\n", "")),
            "session options: expected an integer as block_size, got none");
  EXPECT_EQ(message_of(conf() + "speed = 1\n"), "session options: expected known keys, got speed");
  EXPECT_EQ(message_of(with("block_size = 8", "block_size = 8x")),
            "session options: expected an integer as block_size, got \"8x\"");
  EXPECT_EQ(message_of(with("block_size = 8", "block_size = 8000000000")),
            "session options: expected an integer as block_size, got \"8000000000\"");
  EXPECT_EQ(message_of(with("acceptance_rule = 3", "acceptance_rule = 9")),
            "session options: expected an integer in [0, 8] as acceptance_rule, got \"9\"");
  EXPECT_EQ(message_of(with("masked_rows_only = 1", "masked_rows_only = yes")),
            "session options: expected 0 or 1 as masked_rows_only, got \"yes\"");
  EXPECT_EQ(message_of(with("stop_token_ids = 636 638", "stop_token_ids = 636,638")),
            "session options: expected integers as stop_token_ids, got \"636,638\"");
  EXPECT_EQ(message_of(with("factor = 1.0", "factor =")),
            "session options: expected a number as factor, got \"\"");
  for (const char* text : {"multi_bd", "\"multi_bd", "\"a\\\"", "\"a\\t\"", "\""}) {
    EXPECT_EQ(message_of(with("\"multi_bd\"", text)),
              "session options: expected a text in quotation marks as strategy, got \"" +
                  std::string(text) + "\"");
  }
}

/// A process whose numbers have a comma, as an application may set it.
class CommaLocale {
 public:
  CommaLocale() : old_(std::locale::global(std::locale(std::locale::classic(), new Comma))) {}
  ~CommaLocale() { std::locale::global(old_); }

 private:
  struct Comma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    std::string do_grouping() const override { return "\3"; }
    char do_thousands_sep() const override { return '.'; }
  };
  std::locale old_;
};

TEST(EdgeOptions, NumbersFitTheirType) {
  EXPECT_EQ(message_of(with("\nseed = 0", "\nseed = -1")),
            "session options: expected an integer as seed, got \"-1\"");
  EXPECT_EQ(message_of(with("factor = 1.0", "factor = 1e300")),
            "session options: expected a number as factor, got \"1e300\"");
  uint64_t number = 0;
  EXPECT_TRUE(read_number("18446744073709551615", number));
  EXPECT_FALSE(read_number("18446744073709551616", number));
  float fraction = 0.0F;
  EXPECT_TRUE(read_number("-1e-3", fraction));
  EXPECT_FALSE(read_number("inf", fraction));
}

TEST(EdgeOptions, ReadsNumbersWhateverTheLocale) {
  const std::string text = with("factor = 1.0", "factor = 1.25");
  const CommaLocale locale;
  const char* named = nullptr;  // the locale of C, where the system has such a one
  for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "nl_NL.UTF-8"}) {
    named = named == nullptr ? std::setlocale(LC_NUMERIC, name) : named;
  }
  const Result<EdgeOptions> read = EdgeOptions::parse(text);
  std::setlocale(LC_NUMERIC, "C");
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read.value().sampler.factor, 1.25F);
  EXPECT_EQ(message_of(with("factor = 1.0", "factor = 1,25")),
            "session options: expected a number as factor, got \"1,25\"");
}

TEST(JsonText, ReplacesWhatIsNoUtf8) {
  EXPECT_EQ(json_string("a\"\\\n\xC3\xA9\xF0\x9F\x98\x80"),
            "\"a\\\"\\\\\\u000a\xC3\xA9\xF0\x9F\x98\x80\"");
  const std::string mark = "\xEF\xBF\xBD";
  EXPECT_EQ(json_string("a\xFFz"), "\"a" + mark + "z\"");
  EXPECT_EQ(json_string("\xE2\x82"), "\"" + mark + mark + "\"");             // cut short
  EXPECT_EQ(json_string("\xC0\xAF"), "\"" + mark + mark + "\"");             // overlong
  EXPECT_EQ(json_string("\xED\xA0\x80"), "\"" + mark + mark + mark + "\"");  // a surrogate
  EXPECT_EQ(json_string("\xF4\x90\x80\x80").size(), 2 + 4 * mark.size());    // past U+10FFFF
}

TEST(EdgeOptions, ReadsFiles) {
  const std::string path = ::testing::TempDir() + "/session.conf";
  std::ofstream(path) << conf();
  EXPECT_TRUE(EdgeOptions::load(path).ok());
  std::remove(path.c_str());
  const Status missing = EdgeOptions::load(path).status();
  EXPECT_EQ(missing.code(), StatusCode::kNotFound);
  EXPECT_EQ(missing.message(), path + ": expected a readable file, got none");
}

}  // namespace
}  // namespace diffulex::test
