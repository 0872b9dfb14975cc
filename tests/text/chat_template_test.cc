// The chat template interpreter (Jinja): results, spans of generated text, limits for hostile templates, and the
// template of a folder.
#include "tessera/text/chat/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/text/json.h"
#include "tests/support/temp_folder.h"

namespace tessera::text {
namespace {

using OrderedJson = nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TempFolder;

const OrderedJson kMessages =
    OrderedJson::parse(R"([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hö"}])");

std::string render(const std::string& source, const ChatTemplateLimits& limits = {}) {
  return ChatTemplate::parse(source, "t", limits).render(kMessages, false).text;
}

// Returns the message of the error, which must be of kind kFormat and one line long.
std::string error_of(const std::string& source, const ChatTemplateLimits& limits = {},
                     const OrderedJson& messages = kMessages) {
  try {
    const std::string text = ChatTemplate::parse(source, "t", limits).render(messages, false).text;
    ADD_FAILURE() << source.substr(0, 200) << " gives " << text.substr(0, 200);
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    EXPECT_EQ(error.exit_code(), 3);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("[text.chat_template] t"), Not(HasSubstr("\n"))));
    return error.what();
  }
}

std::string repeated(const std::string& text, size_t times) {
  std::string out;
  for (size_t i = 0; i < times; ++i) out += text;
  return out;
}

TEST(ChatTemplate, RendersMessagesAndGenerationPrompt) {
  const auto chat = ChatTemplate::parse(
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% "
      "endif %}",
      "t");
  EXPECT_EQ(chat.render(kMessages, true).text, "<user>Hi<assistant>Hö<assistant>");
  EXPECT_EQ(chat.render(kMessages, false).text, "<user>Hi<assistant>Hö");
  EXPECT_FALSE(chat.marks_generation());
}

TEST(ChatTemplate, ReportsGenerationSpansInBytes) {
  const auto chat = ChatTemplate::parse(
      "{% for m in messages %}é{% generation %}{{ m.content }}.{% endgeneration %}|{% endfor %}", "t");
  const RenderedChat rendered = chat.render(kMessages, false);
  EXPECT_EQ(rendered.text, "éHi.|éHö.|");
  ASSERT_EQ(rendered.generation_spans.size(), 2u);
  EXPECT_EQ(rendered.text.substr(2, 3), "Hi.");
  EXPECT_EQ(rendered.generation_spans[0], (std::pair<size_t, size_t>{2, 5}));
  EXPECT_EQ(rendered.generation_spans[1], (std::pair<size_t, size_t>{8, 12}));
  EXPECT_TRUE(chat.marks_generation());
}

TEST(ChatTemplate, KeepsTheOrderOfKeysInTools) {
  const OrderedJson extra = OrderedJson::parse(R"({"tools": [{"z": 1, "a": {"y": 2, "b": 3}}]})");
  EXPECT_EQ(ChatTemplate::parse("{{ tools | tojson }}", "t").render(kMessages, false, extra).text,
            R"([{"z": 1, "a": {"y": 2, "b": 3}}])");
}

TEST(ChatTemplate, NumbersOfToolsKeepTheirDigits) {
  const auto extra = parse_json(R"({"tools": [{"maximum": 100000000000000000000, "n": [18446744073709551615]}]})", "t",
                                {.exact_numbers = true});
  EXPECT_EQ(ChatTemplate::parse("{{ tools | tojson }}{{ tools }}", "t").render(kMessages, false, extra).text,
            R"([{"maximum": 100000000000000000000, "n": [18446744073709551615]}])"
            R"([{'maximum': 100000000000000000000, 'n': [18446744073709551615]}])");
}

TEST(ChatTemplate, RendersShareNoState) {
  const auto chat = ChatTemplate::parse(
      "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "t");
  EXPECT_EQ(chat.render(kMessages, false).text, "2");
  EXPECT_EQ(chat.render(kMessages, false).text, "2");
}

TEST(ChatTemplate, ErrorsNameTemplateAndLine) {
  EXPECT_THAT(error_of("a\n\n{{ 1 / 0 }}"), HasSubstr("t line 3: division by zero"));
  EXPECT_THAT(error_of("a\n{% if 1 %}"), HasSubstr("line 2: the template ends, wanted 'endif'"));
  EXPECT_THAT(error_of("{{ raise_exception('no\nsystem') }}"), HasSubstr("refuses these messages: no system"));
  EXPECT_THAT(error_of("{{ messages[0].nothing.more }}"), HasSubstr("no attribute 'nothing'"));
  EXPECT_THAT(error_of("{% include 'x' %}"), HasSubstr("'include' is no tag"));
}

TEST(ChatTemplate, LoopsThatDoNotEndHitTheStepLimit) {
  const std::string loops = repeated("{% for i in range(100000) %}", 4) + repeated("{% endfor %}", 4);
  EXPECT_THAT(error_of(loops), HasSubstr("steps"));
  EXPECT_THAT(error_of("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), HasSubstr("deeper"));
  EXPECT_THAT(error_of("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}"), HasSubstr("deeper"));
}

TEST(ChatTemplate, OutputThatGrowsHitsTheByteLimit) {
  EXPECT_THAT(
      error_of("{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"),
      HasSubstr("bytes"));
  EXPECT_THAT(error_of("{{ 'ab' * 1000000000000 }}"), HasSubstr("bytes"));
  EXPECT_THAT(error_of("{{ '%9999999d' % 1 }}"), HasSubstr("million"));
  EXPECT_THAT(error_of("{% for i in range(1000) %}{{ 'x' * 1000 }}{% endfor %}", {.max_output_bytes = 10000}),
              HasSubstr("10000 bytes"));
  EXPECT_THAT(error_of("{{ 'a\nb' | indent(999999999999) }}"), HasSubstr("bytes"));
  EXPECT_THAT(error_of("{{ 'x' | center(999999999999) }}"), HasSubstr("bytes"));
}

TEST(ChatTemplate, DeepNestingIsAnError) {
  EXPECT_THAT(error_of("{{ " + repeated("(", 5000) + "1" + repeated(")", 5000) + " }}"), HasSubstr("nested deeper"));
  EXPECT_THAT(error_of("{{ " + repeated("-", 100000) + "1 }}"), HasSubstr("nested deeper"));
  EXPECT_THAT(error_of("{{ " + repeated("not ", 100000) + "1 }}"), HasSubstr("nested deeper"));
  EXPECT_THAT(error_of("{{ a" + repeated(".b", 100000) + " }}"), HasSubstr("nested deeper"));
  EXPECT_THAT(error_of(repeated("{% if 1 %}", 5000) + repeated("{% endif %}", 5000)), HasSubstr("nested deeper"));
  EXPECT_THAT(error_of("{% set " + repeated("(", 100000) + "a" + repeated(")", 100000) + " = 1 %}"),
              HasSubstr("nested deeper"));
  EXPECT_THAT(error_of("{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}"),
              HasSubstr("nested deeper"));
  EXPECT_THAT(error_of("{% set ns = namespace() %}{% for i in range(99999) %}{% set ns.me = ns %}{% endfor %}"),
              HasSubstr("nested deeper"));
  OrderedJson deep = "x";
  for (int i = 0; i < 1000; ++i) deep = OrderedJson::array({deep});
  EXPECT_THAT(error_of("x", {}, OrderedJson::array({OrderedJson{{"content", deep}}})), HasSubstr("nested deeper"));
}

TEST(ChatTemplate, NestedBlocksInRecursiveMacrosAreAnError) {
  const std::string loops = repeated("{% for i in [1] %}", 190), ends = repeated("{% endfor %}", 190);
  EXPECT_THAT(error_of("{% macro m() %}" + loops + "{{ m() }}" + ends + "{% endmacro %}{{ m() }}"),
              HasSubstr("deeper"));
  const std::string withs = repeated("{% with %}", 190), with_ends = repeated("{% endwith %}", 190);
  EXPECT_THAT(error_of("{% macro m() %}" + withs + "{{ m() }}" + with_ends + "{% endmacro %}{{ m() }}"),
              HasSubstr("deeper"));
}

// Before their cost was counted, each of these templates took minutes or more. ctest's time limit would end the test.
TEST(ChatTemplate, SharedSubvaluesOfKeysAreHashedOnce) {
  const std::string grow =
      "{% set n = namespace(t=()) %}{% for i in range(60) %}{% set n.t = (n.t, n.t) %}{% endfor %}";
  EXPECT_EQ(render(grow + "{{ {n.t: 1}[n.t] }}"), "1");
  EXPECT_EQ(render(grow + "{{ [n.t, n.t] | unique | list | length }}"), "1");
  const std::string both =
      "{% set n = namespace(t=(), u=()) %}{% for i in range(60) %}"
      "{% set n.t = (n.t, n.t) %}{% set n.u = (n.u, n.u) %}{% endfor %}";
  EXPECT_THAT(error_of(both + "{{ {n.t: 1}[n.u] }}"), HasSubstr("steps"));
}

TEST(ChatTemplate, HostileSearchesTakeLinearTime) {
  const std::string strings =
      "{% set text = 'a' * 1000000 %}{% set wanted = 'a' * 500000 ~ 'b' %}"
      "{% set backwards = 'b' ~ 'a' * 500000 %}";
  EXPECT_EQ(render(strings + "{{ wanted in text }} {{ text.count(wanted) }} {{ text.find(wanted) }} "
                             "{{ text.rfind(backwards) }} {{ text.split(wanted) | length }} "
                             "{{ text.rsplit(backwards) | length }} {{ text.replace(wanted, '') | length }} "
                             "{{ text.partition(wanted)[1] }} {{ text.rpartition(backwards)[1] }}"),
            "False 0 -1 -1 1 1 1000000  ");
  EXPECT_EQ(render("{% set many = ('abc' * 300000) %}{{ ('d' * 1000000 ~ 'x').strip(many ~ 'd') }}"), "x");
}

TEST(ChatTemplate, ReadingValuesCountsTowardsTheStepLimit) {
  const std::string long_key = "{% set key = 'k' * 4000000 %}{% set same = 'k' * 4000000 %}{% set d = {key: 1} %}";
  for (const char* work :
       {"d[same]", "('%(' ~ key ~ ')s') % d", "key is lower", "('x' ~ key) in key", "key.rfind('x')", "d.get(same)"}) {
    EXPECT_THAT(error_of(long_key + "{% for i in range(90000) %}{% set x = " + work + " %}{% endfor %}",
                         {.max_steps = 900'000}),
                HasSubstr("steps"))
        << work;
  }
  std::string names;
  for (int i = 0; i < 20'000; ++i) names += "{% set a" + std::to_string(i) + " = 1 %}";
  EXPECT_THAT(error_of(names + "{% for i in range(90000) %}{{ a }}{% endfor %}"), HasSubstr("steps"));
}

TEST(ChatTemplate, FindsStringsAsPythonDoes) {
  EXPECT_EQ(render("{{ 'abcabc'.rfind('bc') }} {{ 'abab'.rpartition('ab') }} {{ 'a.b.c'.rsplit('.', 1) }} "
                   "{{ 'aaa'.rsplit('aa') }} {{ 'aaa'.split('aa') }} {{ 'xyx'.find('') }} {{ 'xyx'.rfind('') }} "
                   "{{ 'héllo'.rfind('l') }} {{ 'aXbX'.replace('X', '-', 1) }} {{ 'ab'.replace('', '.') }}"),
            "4 ('ab', 'ab', '') ['a.b', 'c'] ['a', ''] ['', 'a'] 0 3 3 a-bX .a.b.");
}

TEST(ChatTemplate, MessagesEscapeTerminalControlCharacters) {
  EXPECT_THAT(error_of("{{ raise_exception('a\x1b[31mb') }}"), HasSubstr("a\\x1b[31mb"));
  EXPECT_THAT(error_of("{{ x['\x1b]0;'].y }}"), Not(HasSubstr("\x1b")));
}

TEST(ChatTemplate, LongOperatorChainsAreNotDeepNesting) {
  EXPECT_EQ(render("{{ 1" + repeated(" + 1", 5000) + " }}"), "5001");
  EXPECT_EQ(render("{{ ''" + repeated(" ~ 'a'", 3000) + " }}").size(), 3000u);
}

TEST(ChatTemplate, ReferenceCyclesAreFreed) {  // checked by the leak sanitizer
  EXPECT_EQ(render("{% set ns = namespace() %}{% set ns.me = ns %}{% macro m() %}{% endmacro %}{% set ns.m = m %}"
                   "{% for i in [1] %}{% set ns.loop = loop %}{{ loop.changed(loop) }}{% endfor %}"),
            "True");
}

TEST(ChatTemplate, RefusesWrongInput) {
  EXPECT_THAT(error_of("x", {}, OrderedJson::parse(R"({"role": "user"})")), HasSubstr("wanted an array"));
  EXPECT_THAT(error_of("x", {}, OrderedJson::parse(R"(["hi"])")), HasSubstr("message 0 is string"));
  EXPECT_THAT(error_of("\xff"), HasSubstr("not UTF-8"));
  EXPECT_THAT(error_of(std::string(2 << 20, 'x')), HasSubstr("wanted at most"));
  const auto big = parse_json(R"([{"n": 18446744073709551616}])", "t", {.exact_numbers = true});
  for (const char* source : {"{{ messages[0].n + 1 }}", "{{ -messages[0].n }}", "{{ 2 * messages[0].n }}",
                             "{{ '%d' % messages[0].n }}", "{{ messages[0].n | round(-1) }}"}) {
    EXPECT_THAT(error_of(source, {}, big), HasSubstr("not fit in 64 bits")) << source;
  }
}

class ChatTemplateFolder : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& content) { std::ofstream(folder_ / name) << content; }
  std::string rendered(const OrderedJson& extra = OrderedJson::object()) {
    return ChatTemplate::from_folder(folder_.path())->render(kMessages, false, extra).text;
  }
  TempFolder folder_;
};

TEST_F(ChatTemplateFolder, WithoutTemplateHasNone) {
  EXPECT_FALSE(ChatTemplate::from_folder(folder_.path()).has_value());
  write("tokenizer_config.json", R"({"bos_token": "<s>", "chat_template": null})");
  EXPECT_FALSE(ChatTemplate::from_folder(folder_.path()).has_value());
}

TEST_F(ChatTemplateFolder, DefinesSpecialTokensAsVariables) {
  write(
      "tokenizer_config.json",
      R"({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}x{{ eos_token }}"})");
  EXPECT_EQ(rendered(), "<s>x</s>");
  EXPECT_EQ(rendered({{"bos_token", "B"}}), "Bx</s>");
}

TEST_F(ChatTemplateFolder, PrefersTheJinjaFileToTheConfig) {
  write("tokenizer_config.json", R"({"eos_token": "E", "chat_template": "config"})");
  write("chat_template.jinja", "file {{ eos_token }}");
  EXPECT_EQ(rendered(), "file E");
}

TEST_F(ChatTemplateFolder, ChoosesFromAListByTools) {
  write("tokenizer_config.json",
        R"({"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]})");
  EXPECT_EQ(rendered(), "plain");
  EXPECT_EQ(rendered({{"tools", OrderedJson::array()}}), "tools");
}

TEST_F(ChatTemplateFolder, RefusesABrokenConfig) {
  for (const char* config :
       {"{", "[]", R"({"chat_template": 5})", R"({"chat_template": []})", R"({"chat_template": [{"name": "default"}]})",
        R"({"chat_template": [{"name": "other", "template": "x"}]})", R"({"chat_template": "{{"})"}) {
    write("tokenizer_config.json", config);
    EXPECT_THROW(ChatTemplate::from_folder(folder_.path()), Error) << config;
  }
}

TEST(ChatTemplate, StrftimeNowUsesTheGivenTime) {
  const auto chat = ChatTemplate::parse("{{ strftime_now('%Y-%m-%d %H:%M %A') }}", "test");
  EXPECT_TRUE(chat.reads_clock());
  EXPECT_EQ(chat.at_time(0).render(nlohmann::ordered_json::array(), false).text, "1970-01-01 00:00 Thursday");
  EXPECT_FALSE(ChatTemplate::parse("{{ 'strftime_now' }}", "test").reads_clock());
}

TEST(ChatTemplate, FindsTextInTemplateLiterals) {
  const auto chat = ChatTemplate::parse("a<b>{# <c> #}{{ '<d>\\n' }}{% if x == 'developer' %}{% endif %}", "test");
  for (const char* text : {"<b>", "<d>\n", "developer", "dev"}) EXPECT_TRUE(chat.contains_literal_text(text)) << text;
  for (const char* text : {"<c>", "<b><d>", "x"}) EXPECT_FALSE(chat.contains_literal_text(text)) << text;
  EXPECT_TRUE(chat.has_literal("developer"));
  EXPECT_FALSE(chat.has_literal("dev"));
}

TEST(ChatTemplate, ReportsTheFormsOfContentThatItReads) {
  const auto form = [](const std::string& content) {
    const auto chat = ChatTemplate::parse("{% for m in messages %}[{{ m.role }}]" + content + "{% endfor %}", "test");
    const auto found = chat.content_form("user");
    return std::string(found.reads_text ? "t" : "") + (found.reads_parts ? "p" : "") +
           (found.reads_all_parts ? "a" : "");
  };
  EXPECT_EQ(form("{{ m.content }}"), "t") << "a list is printed as Python prints it";
  EXPECT_EQ(form("{{ m.content | tojson }}"), "t");
  EXPECT_EQ(form("{{ m.content | trim }}"), "t");
  EXPECT_EQ(form("{{ m.content + '' }}"), "t") << "refuses a list";
  EXPECT_EQ(form("{{ m.content[0].text }}"), "p");
  EXPECT_EQ(form("{% for part in m.content %}{{ part.text }}{% endfor %}"), "pa");
  EXPECT_EQ(form("{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part['text'] }}"
                 "{% endfor %}{% endif %}"),
            "tpa");
  EXPECT_EQ(form("{{ raise_exception('no') }}"), "t");
}

}  // namespace
}  // namespace tessera::text
