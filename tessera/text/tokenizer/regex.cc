#include "tessera/text/tokenizer/regex.h"

#include <dlfcn.h>
#include <oniguruma.h>

#include <algorithm>
#include <new>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::text {
namespace {

constexpr size_t kMaxPatternBytes = 1 << 16;
constexpr unsigned kMaxNesting = 100;
constexpr unsigned kMaxStackEntries = 2'000'000;  // about 100 MB

// The budget of backtracking steps of one find_all(): a constant, plus steps for each byte of the text.
constexpr uint64_t kStepsOfAnyText = 20'000'000;
constexpr uint64_t kStepsOfAByte = 100;
// Oniguruma can limit the steps of a search but does not report how many it used. So each search starts with the limit
// kFirstSteps. As long as the search reaches its limit, it is repeated with kMoreSteps times this limit. The limit of
// each repetition is charged to the budget, so a search is charged at most about kMoreSteps times the steps that it
// needs. The first run, with the limit kFirstSteps, is not charged.
constexpr uint64_t kFirstSteps = 200;
constexpr uint64_t kMoreSteps = 8;

// libonig also defines regcomp() and regexec() of POSIX, with its own types. If Tessera linked libonig, these would
// replace the functions of libc in the whole process. dlopen() with RTLD_LOCAL keeps them invisible to other libraries.
struct Onig {
  decltype(&onig_initialize) initialize;
  decltype(&onig_set_parse_depth_limit) set_parse_depth_limit;
  decltype(&onig_new) make;
  decltype(&onig_free) free;
  decltype(&onig_error_code_to_str) error_code_to_str;
  decltype(&onig_region_new) region_new;
  decltype(&onig_region_clear) region_clear;
  decltype(&onig_region_free) region_free;
  decltype(&onig_new_match_param) new_match_param;
  decltype(&onig_free_match_param) free_match_param;
  decltype(&onig_initialize_match_param) initialize_match_param;
  decltype(&onig_set_match_stack_limit_size_of_match_param) set_stack_limit;
  decltype(&onig_set_retry_limit_in_match_of_match_param) set_retry_limit_in_match;
  decltype(&onig_set_retry_limit_in_search_of_match_param) set_retry_limit_in_search;
  decltype(&onig_search_with_param) search;
  OnigEncoding utf8;
  OnigSyntaxType* syntax;
};

Onig load_onig() {
  constexpr const char* kLibrary = "libonig.so.5";
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  TESSERA_CHECK(library, ErrorKind::kIo, "[text.load] {}: cannot be loaded: {}. Install Oniguruma (Debian: libonig5).",
                kLibrary, ::dlerror());
  Onig onig{};
  const auto find = [&]<class T>(T& into, const char* name) {
    into = reinterpret_cast<T>(::dlsym(library, name));
    TESSERA_CHECK(into, ErrorKind::kIo, "[text.load] {}: holds no {}, wanted Oniguruma 6.9.3 or newer", kLibrary, name);
  };
  find(onig.initialize, "onig_initialize");
  find(onig.set_parse_depth_limit, "onig_set_parse_depth_limit");
  find(onig.make, "onig_new");
  find(onig.free, "onig_free");
  find(onig.error_code_to_str, "onig_error_code_to_str");
  find(onig.region_new, "onig_region_new");
  find(onig.region_clear, "onig_region_clear");
  find(onig.region_free, "onig_region_free");
  find(onig.new_match_param, "onig_new_match_param");
  find(onig.free_match_param, "onig_free_match_param");
  find(onig.initialize_match_param, "onig_initialize_match_param");
  find(onig.set_stack_limit, "onig_set_match_stack_limit_size_of_match_param");
  find(onig.set_retry_limit_in_match, "onig_set_retry_limit_in_match_of_match_param");
  find(onig.set_retry_limit_in_search, "onig_set_retry_limit_in_search_of_match_param");
  find(onig.search, "onig_search_with_param");
  find(onig.utf8, "OnigEncodingUTF8");
  find(onig.syntax, "OnigSyntaxOniguruma");
  OnigEncoding encoding = onig.utf8;
  if (onig.initialize(&encoding, 1) != ONIG_NORMAL) throw std::bad_alloc();
  onig.set_parse_depth_limit(kMaxNesting);
  return onig;
}

const Onig& onig() {
  static const Onig loaded = load_onig();
  return loaded;
}

const OnigUChar* bytes_of(std::string_view text) { return reinterpret_cast<const OnigUChar*>(text.data()); }

}  // namespace

struct RegexScratch::Data {
  OnigRegion* region = nullptr;
  OnigMatchParam* limits = nullptr;
  Data() {
    region = onig().region_new();
    limits = onig().new_match_param();
    if (!region || !limits) throw std::bad_alloc();
    onig().initialize_match_param(limits);
    onig().set_stack_limit(limits, kMaxStackEntries);
  }
  ~Data() {
    if (region) onig().region_free(region, 1);
    if (limits) onig().free_match_param(limits);
  }
};

RegexScratch::RegexScratch() = default;
RegexScratch::~RegexScratch() = default;

Regex::Regex(std::string_view pattern, std::string where) : pattern_(pattern), where_(std::move(where)) {
  TESSERA_CHECK(pattern.size() <= kMaxPatternBytes, ErrorKind::kFormat, "{}: pattern of {} bytes, at most {} allowed",
                where_, pattern.size(), kMaxPatternBytes);
  OnigErrorInfo info{};
  OnigRegex regex = nullptr;
  const int result = onig().make(&regex, bytes_of(pattern), bytes_of(pattern) + pattern.size(), ONIG_OPTION_NONE,
                                 onig().utf8, onig().syntax, &info);
  if (result == ONIG_NORMAL) {
    code_ = std::shared_ptr<void>(regex, [](void* code) { onig().free(static_cast<OnigRegex>(code)); });
    return;
  }
  OnigUChar message[ONIG_MAX_ERROR_MESSAGE_LEN];
  const int length = onig().error_code_to_str(message, result, &info);
  raise(ErrorKind::kFormat, "{}: pattern {} does not compile: {}", where_, quote(pattern_),
        escape({reinterpret_cast<const char*>(message), static_cast<size_t>(std::max(length, 0))}));
}

void Regex::find_all(std::string_view text, RegexScratch& scratch, std::vector<Span>& matches) const {
  const OnigUChar *begin = bytes_of(text), *end = begin + text.size();
  if (!scratch.data_) scratch.data_ = std::make_unique<RegexScratch::Data>();
  OnigRegion* region = scratch.data_->region;
  OnigMatchParam* limits = scratch.data_->limits;
  const auto regex = static_cast<OnigRegex>(code_.get());
  uint64_t steps_left = kStepsOfAnyText + kStepsOfAByte * text.size();
  const auto search = [&](size_t at) {
    for (uint64_t steps = kFirstSteps;; steps *= kMoreSteps) {
      steps = std::min(steps, std::max(steps_left, kFirstSteps));
      onig().set_retry_limit_in_match(limits, steps);
      onig().set_retry_limit_in_search(limits, steps);
      onig().region_clear(region);
      const int found = onig().search(regex, begin, end, begin + at, end, region, ONIG_OPTION_NONE, limits);
      const bool out_of_steps =
          found == ONIGERR_RETRY_LIMIT_IN_MATCH_OVER || found == ONIGERR_RETRY_LIMIT_IN_SEARCH_OVER;
      if (steps > kFirstSteps) steps_left -= std::min(steps, steps_left);
      if (!out_of_steps || steps_left == 0) return found;
    }
  };
  // `at` moves to the end of each match. After an empty match at the end of the last match it moves by one character,
  // so the loop always makes progress.
  size_t last_end = std::string_view::npos;
  for (size_t at = 0; at <= text.size();) {
    const int found = search(at);
    if (found == ONIG_MISMATCH) return;
    TESSERA_CHECK(found >= 0, ErrorKind::kFormat,
                  "{}: pattern {} stopped on a text of {} bytes (Oniguruma error {}): it needs too many steps or too "
                  "much memory. Use a simpler pattern or shorter texts.",
                  where_, quote(pattern_), text.size(), found);
    const auto first = static_cast<size_t>(region->beg[0]), last = static_cast<size_t>(region->end[0]);
    TESSERA_CHECK(at <= first && first <= last && last <= text.size(), ErrorKind::kFormat,
                  "{}: pattern {} matches backwards", where_, quote(pattern_));
    if (first == last && first == last_end) {
      at += at < text.size() ? utf8_length(text[at]) : 1;
      continue;
    }
    matches.push_back({static_cast<uint32_t>(first), static_cast<uint32_t>(last)});
    at = last_end = last;
  }
}

}  // namespace tessera::text
