#include "bench/harness.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/times.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>

#include "tessera/base/error.h"
#include "tessera/base/machine/host.h"

namespace tessera::bench {
namespace {

constexpr double kMaxOtherLoad = 0.05;  // of one core; above it a round is disturbed

// Returns the busy time of all processors of the machine, in jiffies.
double busy_ticks() {
  std::ifstream stat("/proc/stat");
  std::string name;
  double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0;
  stat >> name >> user >> nice >> system >> idle >> iowait >> irq >> softirq;
  return user + nice + system + irq + softirq;
}

struct ProcessTicks {
  pid_t parent = 0;
  double ticks = 0;  // busy time of the process and of its children that have ended
};

std::map<pid_t, ProcessTicks> all_processes() {
  std::map<pid_t, ProcessTicks> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const pid_t process = std::atoi(entry.path().filename().c_str());
    if (process == 0) continue;
    std::ifstream stat(entry.path() / "stat");
    const std::string text((std::istreambuf_iterator<char>(stat)), {});
    const size_t after_name = text.rfind(')');
    if (after_name == std::string::npos) continue;  // the process has ended
    std::istringstream rest(text.substr(after_name + 1));
    std::string state, skipped;
    ProcessTicks found;
    rest >> state >> found.parent;
    for (int field = 5; field < 14; ++field) rest >> skipped;
    double user = 0, system = 0, child_user = 0, child_system = 0;
    rest >> user >> system >> child_user >> child_system;
    found.ticks = user + system + child_user + child_system;
    all[process] = found;
  }
  return all;
}

// Returns the busy time of this process and of all its descendants, in jiffies.
double process_tree_ticks() {
  const auto all = all_processes();
  const pid_t self = ::getpid();
  double sum = 0;
  for (const auto& [process, found] : all) {
    pid_t at = process;
    while (at > 1 && at != self && all.contains(at)) at = all.at(at).parent;
    if (at == self) sum += found.ticks;
  }
  return sum;
}

// Measures the CPU time that other processes used since the construction of this object.
class OtherLoad {
 public:
  double share_of_core() const {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    return (busy_ticks() - process_tree_ticks() - other_ticks_) / static_cast<double>(::sysconf(_SC_CLK_TCK)) / seconds;
  }

 private:
  double other_ticks_ = busy_ticks() - process_tree_ticks();
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

// Returns the versions of the peers' Python libraries. './dev bench' passes them in TESSERA_BENCH_VERSIONS.
static std::string versions() {
  const char* text = std::getenv("TESSERA_BENCH_VERSIONS");
  return text ? text : "";
}

std::string source_folder() {
  const char* folder = std::getenv("TESSERA_SOURCE");
  return folder ? folder : TESSERA_SOURCE_FOLDER;
}

std::filesystem::path assets_folder() {
  const char* folder = std::getenv("TESSERA_ASSETS");
  return folder ? folder : source_folder() + "/build/assets";
}

std::string machine() { return processor_model() + ", " + std::to_string(usable_cores()) + " cores"; }

static std::vector<std::string> python_command(const std::string& script, const std::vector<std::string>& arguments) {
  const char* python = std::getenv("TESSERA_PYTHON");
  std::vector<std::string> command = {python ? python : source_folder() + "/.venv/bin/python",
                                      source_folder() + "/bench/peers/" + script};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

Peer::Peer(const std::string& script, const std::vector<std::string>& arguments, const Environment& environment)
    : Peer(python_command(script, arguments), environment) {}

Peer::Peer(std::vector<std::string> command, const Environment& environment) {
  std::vector<char*> argv;
  for (auto& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  int request[2], answer[2];
  if (::pipe2(request, O_CLOEXEC) != 0 || ::pipe2(answer, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  ::signal(SIGPIPE, SIG_IGN);
  process_ = ::fork();
  if (process_ < 0) throw std::runtime_error("fork failed");
  if (process_ == 0) {
    ::dup2(request[0], 0);
    ::dup2(answer[1], 1);
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    ::execvp(argv[0], argv.data());
    ::dprintf(2, "cannot run %s: %s\n", argv[0], std::strerror(errno));
    ::_exit(127);
  }
  ::close(request[0]);
  ::close(answer[1]);
  request_pipe_ = request[1];
  answer_pipe_ = answer[0];
}

Peer::~Peer() {
  ::close(request_pipe_);  // the peer ends at the end of its input
  ::close(answer_pipe_);
  ::waitpid(process_, nullptr, 0);
}

Json Peer::ask(const Json& request) {
  const std::string line = request.dump() + "\n";
  for (size_t sent = 0; sent < line.size();) {
    const ssize_t step = ::write(request_pipe_, line.data() + sent, line.size() - sent);
    if (step < 0 && errno == EINTR) continue;
    if (step <= 0) throw std::runtime_error("the peer does not read its request");
    sent += static_cast<size_t>(step);
  }
  for (size_t end; (end = received_.find('\n')) == std::string::npos;) {
    char buffer[1 << 16];
    const ssize_t got = ::read(answer_pipe_, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw std::runtime_error("the peer ended without an answer");
    received_.append(buffer, static_cast<size_t>(got));
  }
  const size_t end = received_.find('\n');
  const Json answer = Json::parse(received_.substr(0, end));
  received_.erase(0, end + 1);
  if (answer.contains("error")) throw std::runtime_error("the peer: " + answer["error"].get<std::string>());
  return answer;
}

Summary summarize(std::vector<double> values) {
  std::ranges::sort(values);
  const auto at = [&](double share) {
    const double place = share * static_cast<double>(values.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, values.size() - 1);
    return values[below] + (place - std::floor(place)) * (values[above] - values[below]);
  };
  return {at(0.5), at(0.1), at(0.9)};
}

Harness::Harness(std::string bench, int argc, char** argv) : bench_(std::move(bench)) {
  for (int i = 0; i < argc; ++i) command_ += (i ? " " : "") + std::string(i ? argv[i] : "bench_" + bench_);
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (i + 1 == argc || (flag != "--json" && flag != "--rounds" && flag != "--case")) {
      std::fprintf(stderr,
                   "bench_%s: unknown flag '%s', or a flag without a value. Usage: bench_%s [--json FILE] [--rounds N] "
                   "[--case PART]\n",
                   bench_.c_str(), argv[i], bench_.c_str());
      std::exit(2);
    }
    if (flag == "--json") json_file_ = argv[i + 1];
    if (flag == "--rounds") rounds_ = std::max(1, std::atoi(argv[i + 1]));
    if (flag == "--case") case_filter_ = argv[i + 1];
  }
}

bool Harness::is_selected(const std::string& name) const { return name.find(case_filter_) != std::string::npos; }

void Harness::run(const Case& bench_case) {
  if (!is_selected(bench_case.name)) return;
  std::vector<double> ours, peer_values, tuned, ratios, tuned_ratios;
  int disturbed = 0, repeats_left = rounds_;
  bench_case.ours();  // warm-up
  bench_case.peer();
  if (bench_case.tuned_peer) bench_case.tuned_peer();
  const auto ratio_of = [&](double our, double peer) { return bench_case.higher_is_better ? our / peer : peer / our; };
  while (static_cast<int>(ratios.size()) < rounds_) {
    const OtherLoad other_load;
    // Ours and the peer alternate in running first.
    const bool peer_first = ratios.size() % 2 == 1;
    double peer = peer_first ? bench_case.peer() : 0;
    const double our = bench_case.ours();
    if (!peer_first) peer = bench_case.peer();
    const double tuned_value = bench_case.tuned_peer ? bench_case.tuned_peer() : 0;
    if (other_load.share_of_core() > kMaxOtherLoad) {
      if (repeats_left-- > 0) continue;
      ++disturbed;
    }
    ours.push_back(our);
    peer_values.push_back(peer);
    ratios.push_back(ratio_of(our, peer));
    if (bench_case.tuned_peer) {
      tuned.push_back(tuned_value);
      tuned_ratios.push_back(ratio_of(our, tuned_value));
    }
  }
  const Summary our = summarize(ours), peer = summarize(peer_values), ratio = summarize(ratios);
  Json line = {{"bench", bench_},
               {"case", bench_case.name},
               {"ours", our.median},
               {"peer", peer.median},
               {"unit", bench_case.unit},
               {"ratio", ratio.median},
               {"ratio_10", ratio.low},
               {"ratio_90", ratio.high},
               {"at_least", bench_case.at_least},
               {"at_most", bench_case.at_most},
               {"verified", bench_case.verified()},
               {"rounds", rounds_},
               {"disturbed_rounds", disturbed},
               {"machine", machine()},
               {"threads", threads},
               {"versions", versions()},
               {"command", command_}};
  std::string tuned_text;
  if (bench_case.tuned_peer) {
    const Summary tuned_peer = summarize(tuned), tuned_ratio = summarize(tuned_ratios);
    line.update({{"tuned_peer", tuned_peer.median}, {"tuned_ratio", tuned_ratio.median}});
    tuned_text = fmt::format("  tuned peer {:.3f} ratio {:.2f}", tuned_peer.median, tuned_ratio.median);
  }
  line.update(bench_case.extra);
  const bool passed = line["verified"] && ratio.median >= bench_case.at_least &&
                      (bench_case.at_most == 0 || our.median <= bench_case.at_most);
  failed_ |= !passed;
  const std::string limit =
      bench_case.at_most > 0 ? fmt::format(", at most {:g} {}", bench_case.at_most, bench_case.unit) : "";
  fmt::print(
      "{:<10} {:<36} ours {:>10.3f}  peer {:>10.3f} {:<8} ratio {:>6.2f} [{:.2f}, {:.2f}]{}  at least {:g}{}  {}{}\n",
      bench_, bench_case.name, our.median, peer.median, bench_case.unit, ratio.median, ratio.low, ratio.high,
      tuned_text, bench_case.at_least, limit, line["verified"] ? "verified" : "NOT VERIFIED", passed ? "" : "  FAILED");
  std::fflush(stdout);
  if (!json_file_.empty()) std::ofstream(json_file_, std::ios::app) << line.dump() << "\n";
}

int bench_main(const char* bench, const std::function<int()>& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_%s: %s\n", bench, error.what());
    return exit_code_for(error);
  }
}

}  // namespace tessera::bench
