#include "tessera/parallel/tensor_parallel/parallelize_module.h"

#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/parallel/modules/check_mesh.h"

namespace tessera {
namespace {

using Matches = std::vector<std::pair<std::string, nn::Module*>>;

// Matches one part of the pattern per level of the module tree, so "*" never matches a dot.
void match_below(nn::Module& module, const std::string& path, std::string_view pattern, Matches& out) {
  const size_t dot = pattern.find('.');
  const std::string head(pattern.substr(0, dot));
  for (const auto& [name, child] : module.named_children()) {
    if (fnmatch(head.c_str(), name.c_str(), 0) != 0) continue;
    const std::string below = path.empty() ? name : path + "." + name;
    if (dot == std::string_view::npos) {
      out.emplace_back(below, child.get());
    } else {
      match_below(*child, below, pattern.substr(dot + 1), out);
    }
  }
}

// A module without a style must not have a DTensor parameter: it would combine plain inputs with a DTensor. This
// happens when its parameter is tied to a parameter that the plan shards.
void check_all_have_styles(nn::Module& root, const std::set<nn::Module*>& styled) {
  for (const auto& [path, module] : root.named_modules()) {
    if (styled.contains(module)) continue;
    for (const auto& slot : module->own_parameters()) {
      TESSERA_CHECK(
          !is_dtensor(slot.parameter), ErrorKind::kConfig,
          "[parallel.parallelize_module] {}.{}: is tied to a parameter that the plan shards, but the plan has "
          "no style for '{}'. Add a style with the same placement.",
          path, slot.name, path);
    }
  }
}

}  // namespace

std::vector<std::pair<std::string, nn::Module*>> match_modules(nn::Module& root, const std::string& pattern) {
  Matches out;
  if (pattern.empty()) {
    out.emplace_back("", &root);
  } else {
    match_below(root, "", pattern, out);
  }
  return out;
}

std::vector<std::string> parallelize_module(nn::Module& module, const MeshPtr& mesh, const ParallelPlan& plan,
                                            const ParallelizeOptions& options) {
  check_one_dim_mesh(mesh, "parallel.parallelize_module", "tp");
  std::vector<std::string> unmatched;
  if (plan.empty()) {
    log_warning("[parallel.parallelize_module] the plan is empty, so nothing becomes parallel.");
    return unmatched;
  }
  // All patterns are matched before the first style is applied, so nothing changes if no pattern matches.
  std::vector<std::pair<const ParallelStyle*, Matches>> matched_styles;
  for (const auto& [pattern, style] : plan.entries()) {
    TESSERA_CHECK(style != nullptr, ErrorKind::kConfig,
                  "[parallel.parallelize_module] pattern '{}': found a null style, wanted a ParallelStyle.", pattern);
    auto matches = match_modules(module, pattern);
    if (matches.empty()) {
      unmatched.push_back(pattern);
    } else {
      matched_styles.emplace_back(style.get(), std::move(matches));
    }
  }
  TESSERA_CHECK(
      !matched_styles.empty(), ErrorKind::kConfig,
      "[parallel.parallelize_module] no pattern of the plan ({}) matches a module; the root's children are {}. Write "
      "patterns as \"layers.*.mlp.up_proj\".",
      fmt::join(unmatched, ", "), [&] {
        std::string names;
        for (const auto& [name, child] : module.named_children()) names += (names.empty() ? "" : ", ") + name;
        return names.empty() ? std::string("none") : names;
      }());
  for (const auto& pattern : unmatched) {
    if (options.warn_unmatched) {
      log_warning("[parallel.parallelize_module] pattern '{}' matches no module, so its style has no effect.", pattern);
    }
  }
  // A module that has a DTensor parameter already was sharded by an earlier call and needs no style in this one.
  std::set<nn::Module*> styled;
  for (const auto& [path, each] : module.named_modules()) {
    const auto& own = each->own_parameters();
    if (std::ranges::any_of(own, [](const auto& slot) { return is_dtensor(slot.parameter); })) styled.insert(each);
  }
  const TiedParameters tied(module);
  for (const auto& [style, matches] : matched_styles) {
    for (const auto& [path, each] : matches) {
      style->apply(
          *each,
          {.mesh = mesh, .path = path, .src_data_rank = options.src_data_rank, .tied = &tied, .styled = &styled});
      styled.insert(each);
    }
  }
  check_all_have_styles(module, styled);
  return unmatched;
}

void parallelize_module(nn::Module& module, const MeshPtr& mesh, const StylePtr& style,
                        const ParallelizeOptions& options) {
  parallelize_module(module, mesh, ParallelPlan{{"", style}}, options);
}

}  // namespace tessera
