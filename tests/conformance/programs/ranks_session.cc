#include "tests/conformance/programs/ranks_session.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "tessera/comm/rendezvous/world.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tests/conformance/programs/inputs.h"

namespace tessera::testing {

namespace {

constexpr double kTolerance = 1e-9;

// What a rank has to say after a phase.
struct Word {
  std::string error;      // raised, by libtorch or by this library
  int step = -1;          // where
  std::string wrong;      // a value that differs from the plain one
  std::string signature;  // of what it holds
};

struct RanksParted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where the ranks tell one another how a phase went, without the collectives that may just have failed.
class Meeting {
 public:
  Meeting(int size, std::chrono::milliseconds patience) : words_(size), here_(size), patience_(patience) {}

  std::vector<Word> tell(int rank, Word word) {
    std::unique_lock lock(mutex_);
    words_[rank] = std::move(word);
    here_[rank] = true;
    const int64_t round = round_;
    if (std::all_of(here_.begin(), here_.end(), [](bool here) { return here; })) {
      heard_ = words_;
      here_.assign(here_.size(), false);
      ++round_;
      arrive_.notify_all();
      return heard_;
    }
    const auto over = [&] { return round_ != round || broken_; };
    if (!arrive_.wait_for(lock, patience_, over) || (broken_ && round_ == round)) {
      if (!broken_) {
        parting_ = said();
      }
      broken_ = true;
      arrive_.notify_all();
      throw RanksParted(parting_);
    }
    return heard_;
  }
  // What was said when one rank did not come.
  std::string parting() {
    const std::lock_guard lock(mutex_);
    return parting_;
  }

 private:
  std::string said() const {
    std::string text;
    for (size_t r = 0; r < words_.size(); ++r) {
      text += fmt::format("\n  rank {}: {}", r,
                          !here_[r]                 ? "waits"
                          : words_[r].error.empty() ? "went on"
                                                    : words_[r].error);
    }
    return text;
  }

  std::mutex mutex_;
  std::condition_variable arrive_;
  std::vector<Word> words_, heard_;
  std::vector<bool> here_;
  std::chrono::milliseconds patience_;
  int64_t round_ = 0;
  bool broken_ = false;
  std::string parting_;
};

// An error without what differs from program to program.
std::string label_of(const std::string& error) {
  std::string label;
  int depth = 0;
  for (const char c : error.substr(0, error.find('\n'))) {
    depth -= c == ']' || c == ')';
    if (depth <= 0 && std::isdigit(static_cast<unsigned char>(c)) == 0) {
      label += c;
    }
    depth += c == '[' || c == '(';
  }
  return label.substr(0, 160);
}

class RankRun {
 public:
  RankRun(const Trial& trial, const MeshPtr& mesh, int rank, Meeting& meeting)
      : trial_(trial), program_(trial.program), mesh_(mesh), rank_(rank), meeting_(meeting), machine_(mesh) {}

  Verdict run() {
    if (!phase("forward", [&] { forward(); })) {
      return verdict_;
    }
    step_ = -1;
    const bool backward = !program_.flows.empty();
    const auto first = [&] {
      compare_values();
      if (backward) {
        gradients_ = gradients(program_, values_, laid_out_flows(), program_.twice);
      }
    };
    if (!phase("backward", first) || !backward) {
      return verdict_;
    }
    const bool twice = program_.twice && !trial_.plain.gradients.second.empty();
    const auto second = [&] {
      compare_all(gradients_, trial_.plain.gradients.first, "gradient");
      if (twice) {
        second_ = second_gradients(program_, values_, gradients_, second_flows());
      }
    };
    if (!phase("second backward", second) || !twice) {
      return verdict_;
    }
    phase("comparison", [&] { compare_all(second_, trial_.plain.gradients.second, "second gradient"); });
    return verdict_;
  }

 private:
  template <class Body>
  bool phase(const char* name, Body body) {
    Word word;
    try {
      body();
    } catch (const std::exception& caught) {
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
    const auto find = [&](auto&& suits) { return std::find_if(words.begin(), words.end(), suits); };
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
    const bool all = std::all_of(words.begin(), words.end(),
                                 [&](const Word& w) { return !w.error.empty() && w.step == first.step; });
    const std::string where = first.step < 0 ? name : to_text(program_.steps[first.step]);
    verdict_.step = first.step;
    if (!all) {
      fail("raised on some ranks only, in " + std::string(name),
           fmt::format("rank {}, {}: {}", rank, where, first.error));
      return;
    }
    if (first.step >= 0) {
      const auto refusal = refusal_of(program_.steps[first.step], first.error);
      const bool alike = std::all_of(words.begin(), words.end(), [&](const Word& w) {
        return refusal_of(program_.steps[first.step], w.error) == refusal;
      });
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
    for (size_t i = 0; i < values_.tensors.size(); ++i) {
      sign(static_cast<int>(i), values_.tensors[i]);
    }
  }

  void sign(int id, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return;
    }
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

  // As the gradients themselves lie, what is still to be reduced whole.
  Tensors second_flows() {
    Tensors flows;
    for (size_t i = 0; i < trial_.plain.gradients.second_flows.size(); ++i) {
      const at::Tensor& plain = trial_.plain.gradients.second_flows[i];
      const at::Tensor& gradient = gradients_[i];
      if (!plain.defined() || !gradient.defined() || !gradient.requires_grad()) {
        note(!plain.defined(), fmt::format("gradient {} depends on no input", i));
        flows.emplace_back();
        continue;
      }
      Placements how = placements(gradient);
      for (auto& placement : how) {
        placement = placement.is_partial() ? Replicate() : placement;
      }
      flows.push_back(lay_out(plain, mesh_, how));
    }
    return flows;
  }

  void note(bool holds, const std::string& what) {
    if (!holds && wrong_.empty()) {
      wrong_ = what;
    }
  }

  void compare_values() {
    const Values& wanted = trial_.plain.values;
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

  void compare_all(const Tensors& found, const Tensors& wanted, const char* what) {
    note(found.size() == wanted.size(), fmt::format("{} {}s, wanted {}", found.size(), what, wanted.size()));
    for (size_t i = 0; i < std::min(found.size(), wanted.size()); ++i) {
      compare(found[i], wanted[i], fmt::format("{} {}", what, i), /*may_be_plain=*/true);
    }
  }

  // may_be_plain: the autograd engine and its formulas write plain zeros where nothing flows. COLLECTIVE over the mesh
  // when `found` is partial.
  void compare(const at::Tensor& found, const at::Tensor& wanted, const std::string& what, bool may_be_plain) {
    const at::NoGradGuard no_grad;
    if (found.defined() != wanted.defined()) {
      note(false, what + (found.defined() ? " is defined" : " is undefined"));
      return;
    }
    if (!found.defined()) {
      return;
    }
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
    if (std::any_of(how.begin(), how.end(), [](const Placement& p) { return p.is_partial(); })) {
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
  Meeting& meeting_;
  MeshMachine machine_;
  Values values_;
  Tensors gradients_, second_;
  int step_ = -1;
  std::string wrong_, signature_;
  Verdict verdict_;
};

}  // namespace

class RanksSession::Impl {
 public:
  explicit Impl(std::vector<int64_t> mesh) : mesh(std::move(mesh)) {}
  ~Impl() { end(); }

  Verdict run(std::shared_ptr<const Trial> trial) {
    if (!host_.joinable()) {
      start();
    }
    std::unique_lock lock(mutex_);
    trial_ = std::move(trial);
    verdict_.reset();
    ++number_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return verdict_ || ended_; });
    if (verdict_) {
      return *verdict_;
    }
    lock.unlock();
    end();
    Verdict verdict;
    verdict.kind = Verdict::Kind::kWrong;
    verdict.label = kParted;
    verdict.what = "ranks parted:" + meeting_->parting();
    return verdict;
  }

  const std::vector<int64_t> mesh;
  std::chrono::milliseconds patience{15000};

 private:
  void start() {
    const int size = static_cast<int>(c10::multiply_integers(mesh));
    meeting_ = std::make_unique<Meeting>(size, patience);
    ended_ = stop_ = false;
    host_ = std::thread([this, size] {
      try {
        comm::run_thread_ranks(size, [&](const std::shared_ptr<comm::World>& world) { serve(world); });
      } catch (const std::exception&) {  // told by the meeting
      }
      const std::lock_guard lock(mutex_);
      ended_ = true;
      changed_.notify_all();
    });
  }

  void end() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      changed_.notify_all();
    }
    if (host_.joinable()) {
      host_.join();
    }
    trial_.reset();
  }

  void serve(const std::shared_ptr<comm::World>& world) {
    const auto on = init_device_mesh(world, "cpu", mesh);
    int64_t done = 0;
    {
      const std::lock_guard lock(mutex_);
      done = number_ - (trial_ != nullptr && !verdict_ ? 1 : 0);
    }
    for (;;) {
      std::shared_ptr<const Trial> trial;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stop_ || number_ != done; });
        if (stop_) {
          return;
        }
        done = number_;
        trial = trial_;
      }
      Verdict verdict = RankRun(*trial, on, world->rank(), *meeting_).run();
      if (world->rank() == 0) {
        const std::lock_guard lock(mutex_);
        verdict_ = std::move(verdict);
        changed_.notify_all();
      }
    }
  }

  std::thread host_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Meeting> meeting_;
  std::shared_ptr<const Trial> trial_;
  std::optional<Verdict> verdict_;
  int64_t number_ = 0;
  bool ended_ = false;
  bool stop_ = false;
};

RanksSession::RanksSession(std::vector<int64_t> mesh) : impl_(std::make_unique<Impl>(std::move(mesh))) {}
RanksSession::~RanksSession() = default;
void RanksSession::set_patience(std::chrono::milliseconds patience) { impl_->patience = patience; }
Verdict RanksSession::run(std::shared_ptr<const Trial> trial) { return impl_->run(std::move(trial)); }
const std::vector<int64_t>& RanksSession::mesh() const { return impl_->mesh; }

}  // namespace tessera::testing
