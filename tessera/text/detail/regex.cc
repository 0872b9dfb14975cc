#include "tessera/text/detail/regex.h"

#include <oniguruma.h>

#include <algorithm>
#include <mutex>
#include <new>

#include "tessera/base/error.h"
#include "tessera/base/quote.h"
#include "tessera/text/detail/unicode.h"

namespace tessera::text {
namespace {

constexpr size_t kMaxPatternBytes = 1 << 16;
constexpr unsigned kMaxNesting = 100;
constexpr unsigned kMaxStackEntries = 2'000'000;  // about 100 MB

// Steps back that all searches of one find_all() may take.
constexpr uint64_t kStepsOfAnyText = 20'000'000;
constexpr uint64_t kStepsOfAByte = 100;
// Oniguruma limits the steps of a search, but does not tell how many it took: a search begins with few and gets more as
// long as it runs out of them, so that what it took is known well enough. The first few are free.
constexpr uint64_t kFirstSteps = 200;
constexpr uint64_t kMoreSteps = 8;

const OnigUChar* bytes_of(std::string_view text) { return reinterpret_cast<const OnigUChar*>(text.data()); }

void initialize() {
  static std::once_flag once;
  std::call_once(once, [] {
    OnigEncoding encoding = ONIG_ENCODING_UTF8;
    if (onig_initialize(&encoding, 1) != ONIG_NORMAL) throw std::bad_alloc();
    onig_set_parse_depth_limit(kMaxNesting);
  });
}

}  // namespace

struct RegexScratch::Data {
  OnigRegion* region = nullptr;
  OnigMatchParam* limits = nullptr;
  Data() {
    initialize();
    region = onig_region_new();
    limits = onig_new_match_param();
    if (!region || !limits) throw std::bad_alloc();
    onig_initialize_match_param(limits);
    onig_set_match_stack_limit_size_of_match_param(limits, kMaxStackEntries);
  }
  ~Data() {
    if (region) onig_region_free(region, 1);
    if (limits) onig_free_match_param(limits);
  }
};

RegexScratch::RegexScratch() : data_(std::make_unique<Data>()) {}
RegexScratch::~RegexScratch() = default;

struct Regex::Code {
  OnigRegex regex = nullptr;
  ~Code() {
    if (regex) onig_free(regex);
  }
};

Regex::Regex(std::string_view pattern, std::string where)
    : pattern_(pattern), where_(std::move(where)), code_(std::make_unique<Code>()) {
  TESSERA_CHECK(pattern.size() <= kMaxPatternBytes, ErrorKind::kFormat, "{}: pattern of {} bytes, at most {} allowed",
                where_, pattern.size(), kMaxPatternBytes);
  initialize();
  OnigErrorInfo info{};
  const int result = onig_new(&code_->regex, bytes_of(pattern), bytes_of(pattern) + pattern.size(), ONIG_OPTION_NONE,
                              ONIG_ENCODING_UTF8, ONIG_SYNTAX_ONIGURUMA, &info);
  if (result == ONIG_NORMAL) return;
  code_->regex = nullptr;
  OnigUChar message[ONIG_MAX_ERROR_MESSAGE_LEN];
  const int length = onig_error_code_to_str(message, result, &info);
  raise(ErrorKind::kFormat, "{}: pattern {} does not compile: {}", where_, quote(pattern_),
        escape({reinterpret_cast<const char*>(message), static_cast<size_t>(std::max(length, 0))}));
}

Regex::~Regex() = default;

void Regex::find_all(std::string_view text, RegexScratch& scratch, std::vector<Span>& matches) const {
  const OnigUChar *begin = bytes_of(text), *end = begin + text.size();
  OnigRegion* region = scratch.data_->region;
  OnigMatchParam* limits = scratch.data_->limits;
  uint64_t steps_left = kStepsOfAnyText + kStepsOfAByte * text.size();
  const auto search = [&](size_t at) {
    for (uint64_t steps = kFirstSteps;; steps *= kMoreSteps) {
      steps = std::min(steps, std::max(steps_left, kFirstSteps));
      onig_set_retry_limit_in_match_of_match_param(limits, steps);
      onig_set_retry_limit_in_search_of_match_param(limits, steps);
      onig_region_clear(region);
      const int found =
          onig_search_with_param(code_->regex, begin, end, begin + at, end, region, ONIG_OPTION_NONE, limits);
      const bool out_of_steps =
          found == ONIGERR_RETRY_LIMIT_IN_MATCH_OVER || found == ONIGERR_RETRY_LIMIT_IN_SEARCH_OVER;
      if (steps > kFirstSteps) steps_left -= std::min(steps, steps_left);
      if (!out_of_steps || steps_left == 0) return found;
    }
  };
  size_t last_end = std::string_view::npos;
  for (size_t at = 0; at <= text.size();) {
    const int found = search(at);
    if (found == ONIG_MISMATCH) return;
    TESSERA_CHECK(found >= 0, ErrorKind::kFormat,
                  "{}: pattern {} gave up on a text of {} bytes (Oniguruma's error {}): too many steps or too much "
                  "memory. Use a simpler pattern or shorter texts.",
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
