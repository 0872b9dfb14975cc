#include "tests/conformance/programs/rank_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

#include "tessera/comm/errors/peer_failed.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tests/conformance/programs/inputs.h"

namespace tessera::testing {

namespace {

constexpr double kTolerance = 1e-9;

// Returns the error without the parts that differ from program to program.
std::string label_of(const std::string& error) {
  std::string label;
  int depth = 0;
  for (const char c : error.substr(0, error.find('\n'))) {
    depth -= c == ']' || c == ')';
    if (depth <= 0 && std::isdigit(static_cast<unsigned char>(c)) == 0) label += c;
    depth += c == '[' || c == '(';
  }
  return label.substr(0, 160);
}

class RankRun {
 public:
  RankRun(const Trial& trial, const MeshPtr& mesh, int rank, Meeting<Word>& meeting)
      : trial_(trial), program_(trial.program), mesh_(mesh), rank_(rank), meeting_(meeting), machine_(mesh) {}

  Verdict run() {
    if (!phase("forward", [&] { forward(); })) return verdict_;
    step_ = -1;
    const bool backward = !program_.flows.empty();
    const auto first = [&] {
      compare_values();
      if (backward) gradients_ = gradients(program_, values_, laid_out_flows(), program_.twice);
    };
    if (!phase("backward", first) || !backward) return verdict_;
    const bool twice = program_.twice && !trial_.plain.gradients.second.empty();
    const auto second = [&] {
      compare_all(gradients_, trial_.plain.gradients.first, "gradient");
      if (twice) second_ = second_gradients(program_, values_, gradients_, second_flows());
    };
    if (!phase("second backward", second) || !twice) return verdict_;
    phase("comparison",
          [&] { compare_all(second_, trial_.plain.gradients.second, "second gradient", /*may_lack_zeros=*/true); });
    return verdict_;
  }

 private:
  template <class Body>
  bool phase(const char* name, Body body) {
    Word word;
    try {
      body();
    } catch (const std::exception& caught) {
      word.peer_failed = dynamic_cast<const comm::PeerFailed*>(&caught) != nullptr;
      word.error = text_of(caught);
      word.error = word.error.empty() ? "an exception without text" : word.error;
    }
    word.step = step_;
    word.wrong = wrong_;
    word.signature = word.error.empty() ? signature_ : "";
    judge(name, meeting_.tell(rank_, std::move(word)));
    return verdict_.kind == Verdict::Kind::kFine;
  }

  void judge(const char* name, const std::vector<Word>& words) {
    const auto find = [&](auto&& suits) { return std::ranges::find_if(words, suits); };
    const auto raised = find([](const Word& w) { return !w.error.empty(); });
    if (raised != words.end()) {
      judge_error(name, words, *raised, static_cast<int>(raised - words.begin()));
      return;
    }
    const auto wrong = find([](const Word& w) { return !w.wrong.empty(); });
    if (wrong != words.end()) {
      fail("wrong value", fmt::format("rank {}: {}", wrong - words.begin(), wrong->wrong));
      return;
    }
    const auto other = find([&](const Word& w) { return w.signature != words[0].signature; });
    if (other != words.end()) {
      fail("ranks differ in what they hold",
           fmt::format("rank 0:\n{}rank {}:\n{}", words[0].signature, other - words.begin(), other->signature));
    }
  }

  void judge_error(const char* name, const std::vector<Word>& words, const Word& first, int rank) {
    const bool all =
        std::ranges::all_of(words, [&](const Word& w) { return !w.error.empty() && w.step == first.step; });
    const std::string where = first.step < 0 ? name : to_text(program_.steps[first.step]);
    verdict_.step = first.step;
    // After a failed peer the groups cannot be used any more.
    verdict_.parted = std::ranges::any_of(words, [](const Word& w) { return w.peer_failed; });
    if (!all) {
      fail("raised on some ranks only, in " + std::string(name),
           fmt::format("rank {}, {}: {}", rank, where, first.error));
      return;
    }
    if (first.step >= 0) {
      const auto refusal = refusal_of(program_.steps[first.step], first.error);
      const bool alike = std::ranges::all_of(
          words, [&](const Word& w) { return refusal_of(program_.steps[first.step], w.error) == refusal; });
      if (refusal != Refusal::kNone && alike) {
        verdict_.kind = Verdict::Kind::kRefused;
        verdict_.refusal = refusal;
        verdict_.what = first.error;
        return;
      }
    }
    fail(fmt::format("{}: {}", name, label_of(first.error)), fmt::format("{}: {}", where, first.error));
  }

  void fail(std::string label, std::string what) {
    verdict_.kind = Verdict::Kind::kWrong;
    verdict_.label = std::move(label);
    verdict_.what = std::move(what);
  }

  void forward() {
    values_.tensors.resize(program_.value_count());
    for (const auto& step : program_.steps) {
      ++step_;
      machine_.run(step, values_, program_.values);
    }
    for (size_t i = 0; i < values_.tensors.size(); ++i) sign(static_cast<int>(i), values_.tensors[i]);
  }

  void sign(int id, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    signature_ += fmt::format("%{} {} [{}] strides [{}]{} {}\n", id, short_name(tensor.scalar_type()),
                              fmt::join(tensor.sizes(), ", "), fmt::join(tensor.strides(), ", "),
                              tensor.is_contiguous() ? " contiguous" : "",
                              is_dtensor(tensor) ? to_string(placements(tensor)) : "plain");
  }

  Tensors laid_out_flows() {
    Tensors flows;
    for (size_t i = 0; i < program_.flows.size(); ++i) {
      flows.push_back(lay_out(trial_.plain.flows[i], mesh_, program_.flows[i].placements));
    }
    return flows;
  }

  // The second gradients have the placements of the gradients; a Partial gradient has a replicated one.
  Tensors second_flows() {
    Tensors flows;
    for (size_t i = 0; i < trial_.plain.gradients.second_flows.size(); ++i) {
      const at::Tensor& plain = trial_.plain.gradients.second_flows[i];
      const at::Tensor& gradient = gradients_[i];
      if (!plain.defined() || !gradient.defined() || !gradient.requires_grad()) {
        note(!plain.defined() || depends_in_vain(program_, i), fmt::format("gradient {} depends on no input", i));
        flows.emplace_back();
        continue;
      }
      Placements how = placements(gradient);
      for (auto& placement : how) placement = placement.is_partial() ? Replicate() : placement;
      flows.push_back(lay_out(plain, mesh_, how));
    }
    return flows;
  }

  void note(bool holds, const std::string& what) {
    if (!holds && wrong_.empty()) wrong_ = what;
  }

  void compare_values() {
    const Results& wanted = trial_.plain.values;
    for (size_t i = 0; i < wanted.tensors.size(); ++i) {
      if (wanted.tensors[i].defined()) {
        compare(values_.tensors[i], wanted.tensors[i], fmt::format("%{}", i), /*may_be_plain=*/false);
        note(values_.tensors[i].requires_grad() == wanted.tensors[i].requires_grad(),
             fmt::format("%{} {}", i, wanted.tensors[i].requires_grad() ? "takes no gradient" : "takes a gradient"));
      }
    }
    for (size_t i = 0; i < wanted.others.size(); ++i) {
      const auto& found = values_.others.at(i);
      note(wanted.others[i].isDouble() ? std::abs(found.toDouble() - wanted.others[i].toDouble()) < kTolerance
                                       : found == wanted.others[i],
           fmt::format("number {} differs", i));
    }
  }

  // may_lack_zeros: the formulas of second derivatives that skip a zero depend on the tensors that are empty.
  void compare_all(const Tensors& found, const Tensors& wanted, const char* what, bool may_lack_zeros = false) {
    note(found.size() == wanted.size(), fmt::format("{} {}s, wanted {}", found.size(), what, wanted.size()));
    for (size_t i = 0; i < std::min(found.size(), wanted.size()); ++i) {
      const auto name = fmt::format("{} {}", what, i);
      if (may_lack_zeros && found[i].defined() != wanted[i].defined()) {
        const at::Tensor& tensor = found[i].defined() ? found[i] : wanted[i];
        note(is_zero(is_dtensor(tensor) ? to_local(tensor.detach()) : tensor),
             name + (found[i].defined() ? " is not zero" : " is undefined"));
        continue;
      }
      compare(found[i], wanted[i], name, /*may_be_plain=*/true);
    }
  }

  // may_be_plain: the autograd engine and its formulas give plain zeros for tensors without an incoming gradient.
  // COLLECTIVE over the mesh if `found` is Partial.
  void compare(const at::Tensor& found, const at::Tensor& wanted, const std::string& what, bool may_be_plain) {
    const at::NoGradGuard no_grad;
    if (found.defined() != wanted.defined()) {
      note(false, what + (found.defined() ? " is defined" : " is undefined"));
      return;
    }
    if (!found.defined()) return;
    if (!is_dtensor(found)) {
      note(may_be_plain && !at::any(found).item<bool>(), what + " is a plain tensor");
      note_difference(found, wanted, what);
      return;
    }
    if (found.sizes() != wanted.sizes()) {
      note(false, fmt::format("{} has shape [{}], wanted [{}]", what, fmt::join(found.sizes(), ", "),
                              fmt::join(wanted.sizes(), ", ")));
      return;
    }
    const auto& how = placements(found);
    const std::string where = what + " as " + to_string(how);
    note(found.scalar_type() == wanted.scalar_type(),
         fmt::format("{} has type {}", where, short_name(found.scalar_type())));
    if (std::ranges::any_of(how, [](const Placement& p) { return p.is_partial(); })) {
      note_difference(full_tensor(found.detach()), wanted, where);
    } else {
      const at::Tensor part = to_local(distribute_tensor(wanted.detach(), mesh_, how, std::nullopt));
      note_difference(to_local(found.detach()), part, where + ", the part");
    }
  }

  void note_difference(const at::Tensor& found, const at::Tensor& wanted, const std::string& what) {
    if (wrong_.empty()) {
      const std::string differs = difference(found, wanted, kTolerance);
      note(differs.empty(), what + ": " + differs);
    }
  }

  const Trial& trial_;
  const Program& program_;
  const MeshPtr& mesh_;
  int rank_;
  Meeting<Word>& meeting_;
  MeshMachine machine_;
  Results values_;
  Tensors gradients_, second_;
  int step_ = -1;
  std::string wrong_, signature_;
  Verdict verdict_;
};

}  // namespace

Verdict run_on_rank(const Trial& trial, const MeshPtr& mesh, int rank, Meeting<Word>& meeting) {
  return RankRun(trial, mesh, rank, meeting).run();
}

}  // namespace tessera::testing
