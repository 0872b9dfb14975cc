#include "bench/harness.h"

#include <fcntl.h>
#include <sched.h>
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
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>

namespace tessera::bench {
namespace {

constexpr double kMostOthers = 0.05;  // of a core

// Jiffies that all processors of the machine were busy.
double busy_ticks() {
  std::ifstream stat("/proc/stat");
  std::string name;
  double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0;
  stat >> name >> user >> nice >> system >> idle >> iowait >> irq >> softirq;
  return user + nice + system + irq + softirq;
}

double ticks_of(pid_t process) {
  std::ifstream stat("/proc/" + std::to_string(process) + "/stat");
  std::string text((std::istreambuf_iterator<char>(stat)), {});
  const size_t after_name = text.rfind(')');
  if (after_name == std::string::npos) return 0;
  std::istringstream rest(text.substr(after_name + 1));
  std::string skipped;
  for (int field = 3; field < 14; ++field) rest >> skipped;
  double user = 0, system = 0, child_user = 0, child_system = 0;
  rest >> user >> system >> child_user >> child_system;
  return user + system + child_user + child_system;
}

// With the processes that it started, and they.
double ticks_of_tree(pid_t root) {
  std::multimap<pid_t, pid_t> children;
  std::error_code gone;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", gone)) {
    std::ifstream status(entry.path() / "status");
    const pid_t process = std::atoi(entry.path().filename().c_str());
    for (std::string line; process > 0 && std::getline(status, line);) {
      if (line.starts_with("PPid:")) children.emplace(std::atoi(line.c_str() + 5), process);
    }
  }
  const std::function<double(pid_t)> sum = [&](pid_t process) {
    double ticks = ticks_of(process);
    const auto [begin, end] = children.equal_range(process);
    for (auto child = begin; child != end; ++child) ticks += sum(child->second);
    return ticks;
  };
  return sum(root);
}

// Processor time that went to others while it lived.
class Disturbance {
 public:
  explicit Disturbance(const std::vector<const Peer*>& peers) : peers_(peers), others_(others()), begin_(std::chrono::steady_clock::now()) {}
  double share_of_core() const {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    return (others() - others_) / static_cast<double>(::sysconf(_SC_CLK_TCK)) / seconds;
  }

 private:
  double others() const {
    double ticks = busy_ticks() - ticks_of(::getpid());
    for (const Peer* peer : peers_) ticks -= ticks_of_tree(peer->process());
    return ticks;
  }
  const std::vector<const Peer*>& peers_;
  double others_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace

std::string source_folder() {
  const char* folder = std::getenv("TESSERA_SOURCE");
  return folder ? folder : TESSERA_SOURCE_FOLDER;
}

std::string machine() {
  std::ifstream info("/proc/cpuinfo");
  std::string model = "unknown processor";
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) {
      model = line.substr(line.find(':') + 2);
      break;
    }
  }
  cpu_set_t set;
  const int cores = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return model + ", " + std::to_string(cores) + " cores";
}

static std::vector<std::string> python_command(const std::string& script, const std::vector<std::string>& arguments) {
  const char* python = std::getenv("TESSERA_PYTHON");
  std::vector<std::string> words = {python ? python : source_folder() + "/.venv/bin/python", source_folder() + "/bench/peers/" + script};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return words;
}

Peer::Peer(const std::string& script, const std::vector<std::string>& arguments, const Environment& environment)
    : Peer(python_command(script, arguments), environment) {}

Peer::Peer(std::vector<std::string> words, const Environment& environment) {
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
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
  to_ = request[1];
  from_ = answer[0];
}

Peer::~Peer() {
  ::close(to_);  // the peer ends at the end of its input
  ::close(from_);
  ::waitpid(process_, nullptr, 0);
}

Json Peer::ask(const Json& request) {
  const std::string line = request.dump() + "\n";
  for (size_t sent = 0; sent < line.size();) {
    const ssize_t step = ::write(to_, line.data() + sent, line.size() - sent);
    if (step < 0 && errno == EINTR) continue;
    if (step <= 0) throw std::runtime_error("the peer does not read its request");
    sent += static_cast<size_t>(step);
  }
  for (size_t end; (end = received_.find('\n')) == std::string::npos;) {
    char buffer[1 << 16];
    const ssize_t got = ::read(from_, buffer, sizeof buffer);
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
  std::sort(values.begin(), values.end());
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
      std::fprintf(stderr, "bench_%s: unknown '%s'. Usage: bench_%s [--json FILE] [--rounds N] [--case PART]\n", bench_.c_str(), argv[i], bench_.c_str());
      std::exit(2);
    }
    if (flag == "--json") json_file_ = argv[i + 1];
    if (flag == "--rounds") rounds_ = std::max(1, std::atoi(argv[i + 1]));
    if (flag == "--case") only_ = argv[i + 1];
  }
}

bool Harness::wants(const std::string& name) const { return name.find(only_) != std::string::npos; }

void Harness::run(const Case& what, const std::vector<const Peer*>& peers) {
  if (!wants(what.name)) return;
  std::vector<double> ours, theirs, ratios;
  int disturbed = 0, repeats_left = rounds_;
  what.ours();  // warm both up
  what.peer();
  while (static_cast<int>(ratios.size()) < rounds_) {
    const Disturbance others(peers);
    // Neither half always goes first.
    const bool peer_first = ratios.size() % 2 == 1;
    double peer = peer_first ? what.peer() : 0;
    const double our = what.ours();
    if (!peer_first) peer = what.peer();
    if (others.share_of_core() > kMostOthers) {
      if (repeats_left-- > 0) continue;
      ++disturbed;
    }
    ours.push_back(our);
    theirs.push_back(peer);
    ratios.push_back(what.higher_is_better ? our / peer : peer / our);
  }
  const Summary our = summarize(ours), peer = summarize(theirs), ratio = summarize(ratios);
  Json line = {{"bench", bench_}, {"case", what.name}, {"ours", our.median}, {"peer", peer.median}, {"unit", what.unit},
               {"ratio", ratio.median}, {"ratio_10", ratio.low}, {"ratio_90", ratio.high}, {"at_least", what.at_least},
               {"verified", what.verified}, {"rounds", rounds_}, {"disturbed_rounds", disturbed}, {"machine", machine()},
               {"threads", threads}, {"command", command_}};
  line.update(what.extra);
  const bool good = what.verified && ratio.median >= what.at_least;
  failed_ |= !good;
  std::printf("%-12s %-28s ours %10.3f  peer %10.3f %-8s ratio %6.2f [%.2f, %.2f] wanted %.1f %s%s\n", bench_.c_str(), what.name.c_str(),
              our.median, peer.median, what.unit.c_str(), ratio.median, ratio.low, ratio.high, what.at_least, what.verified ? "verified" : "NOT VERIFIED",
              good ? "" : "  MISSED");
  std::fflush(stdout);
  if (!json_file_.empty()) std::ofstream(json_file_, std::ios::app) << line.dump() << "\n";
}

}  // namespace tessera::bench
