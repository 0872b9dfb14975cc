#include "tessera/comm/rendezvous/rendezvous.h"

#include <cstdlib>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/machine/endpoint.h"
#include "tessera/base/text/number.h"

namespace tessera::comm {
namespace {

std::optional<int> number_of(const Environment& environment, const char* name) {
  const auto text = environment(name);
  if (!text) return std::nullopt;
  const auto value = parse_number<int>(*text);
  TESSERA_CHECK(value && *value >= 0, ErrorKind::kConfig, "[comm.rendezvous] {}='{}': wanted a whole number", name,
                *text);
  return value;
}

int required_number(const Environment& environment, const char* name, const char* because) {
  const auto value = number_of(environment, name);
  TESSERA_CHECK(value, ErrorKind::kConfig, "[comm.rendezvous] {} is not set, though {}", name, because);
  return *value;
}

// Names of the environment variables in which a launcher sets rank and world size.
struct RankVariables {
  const char *rank, *size, *local_rank, *local_size;
};
constexpr RankVariables kTorchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK",
                                     "LOCAL_WORLD_SIZE"};  // also of Tessera's launcher

void check_info(const WorldInfo& info, const RankVariables& names) {
  TESSERA_CHECK(info.size >= 1 && info.rank < info.size, ErrorKind::kConfig,
                "[comm.rendezvous] {}={} and {}={}: wanted a rank below the size", names.rank, info.rank, names.size,
                info.size);
  TESSERA_CHECK(info.local_size <= info.size && (info.local_size == 0 || info.local_rank < info.local_size),
                ErrorKind::kConfig, "[comm.rendezvous] {}={}, {}={} and {}={} contradict one another", names.local_rank,
                info.local_rank, names.local_size, info.local_size, names.size, info.size);
}

// Reads rank and world size, which are required, and local rank and local size. Without a local rank, local_size is 0:
// meet() then finds both from the hosts' identities.
WorldInfo read_info(const Environment& environment, const RankVariables& names, const char* because) {
  WorldInfo info;
  info.rank = required_number(environment, names.rank, because);
  info.size = required_number(environment, names.size, because);
  const auto local_rank = number_of(environment, names.local_rank);
  const auto local_size = number_of(environment, names.local_size);
  info.local_rank = local_rank.value_or(0);
  info.local_size = local_rank ? local_size.value_or(0) : 0;
  check_info(info, names);
  return info;
}

// Prefix of the store's keys for one attempt, so that restarted ranks do not read keys of the previous attempt.
std::string attempt_of(const Environment& environment) {
  return "attempt_" + environment("TORCHELASTIC_RESTART_COUNT").value_or("0");
}

RendezvousPoint launcher_rendezvous(const Environment& environment) {
  RendezvousPoint point;
  point.info = read_info(environment, kTorchrun, "TESSERA_RENDEZVOUS is");
  point.info.source = "flags";
  point.prefix = attempt_of(environment);
  const std::string where = *environment("TESSERA_RENDEZVOUS");
  if (where.starts_with("file:")) {
    point.folder = where.substr(5);
  } else {
    TESSERA_CHECK(where.starts_with("tcp:"), ErrorKind::kConfig,
                  "[comm.rendezvous] TESSERA_RENDEZVOUS='{}': wanted file:FOLDER or tcp:HOST:PORT", where);
    std::tie(point.host, point.port) = parse_endpoint(where.substr(4), "TESSERA_RENDEZVOUS");
    point.serve = point.info.rank == 0;
  }
  return point;
}

// The rendezvous of processes that were started by hand, one per host, with --nnodes, --node-rank and --master.
RendezvousPoint flags_rendezvous(const RendezvousFlags& flags) {
  TESSERA_CHECK(flags.node_rank >= 0 && flags.node_rank < flags.nnodes, ErrorKind::kConfig,
                "[comm.rendezvous] --node-rank {} with --nnodes {}: wanted 0 to {}", flags.node_rank, flags.nnodes,
                flags.nnodes - 1);
  TESSERA_CHECK(!flags.master.empty(), ErrorKind::kConfig,
                "[comm.rendezvous] --nnodes {} needs --master HOST:PORT, an address of the first host", flags.nnodes);
  RendezvousPoint point;
  point.info = {.rank = flags.node_rank, .size = flags.nnodes, .local_rank = 0, .local_size = 1, .source = "flags"};
  std::tie(point.host, point.port) = parse_endpoint(flags.master, "--master");
  point.serve = flags.node_rank == 0;
  return point;
}

// With TORCHELASTIC_USE_AGENT_STORE torchrun's agent serves a c10d TCPStore at MASTER_PORT, and the ranks use it.
// Otherwise the port is free, and rank 0 serves Tessera's store there.
RendezvousPoint torchrun_rendezvous(const Environment& environment) {
  RendezvousPoint point;
  point.info = read_info(environment, kTorchrun, environment("RANK") ? "RANK is" : "WORLD_SIZE is");
  point.info.source = "torchrun";
  if (point.info.size == 1) return point;
  const auto address = environment("MASTER_ADDR");
  TESSERA_CHECK(address, ErrorKind::kConfig, "[comm.rendezvous] MASTER_ADDR is not set, though RANK is");
  point.host = *address;
  point.port = parse_port(environment("MASTER_PORT").value_or(""), "MASTER_PORT");
  const bool agent = environment("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  point.is_torchrun_store = agent;
  point.serve = !agent && point.info.rank == 0;
  point.prefix = attempt_of(environment);
  return point;
}

// Derives a port from the job's name: equal on all ranks of a job, different for most other jobs.
int port_of_job(std::string_view job) {
  uint32_t hash = 2166136261U;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<uint8_t>(c)) * 16777619U;
  return 20000 + static_cast<int>(hash % 12000);  // below the kernel's ephemeral ports (from 32768)
}

// The store's address for Slurm and MPI: MASTER_ADDR and MASTER_PORT where set; else loopback when all ranks are on
// this host, otherwise `host`, and a port that is derived from the job's name.
void choose_endpoint(RendezvousPoint& point, const Environment& environment, const std::string& host,
                     const std::string& job) {
  const auto address = environment("MASTER_ADDR"), port = environment("MASTER_PORT");
  point.host = address.value_or(point.info.local_size == point.info.size ? "127.0.0.1" : host);
  point.port = port ? parse_port(*port, "MASTER_PORT") : port_of_job(job);
  point.serve = point.info.rank == 0;
}

RendezvousPoint slurm_rendezvous(const Environment& environment) {
  constexpr const char* kBecause = "this is a Slurm step";
  RendezvousPoint point;
  WorldInfo& info = point.info;
  info.rank = required_number(environment, "SLURM_PROCID", kBecause);
  info.size = required_number(environment, "SLURM_STEP_NUM_TASKS", kBecause);
  info.local_rank = required_number(environment, "SLURM_LOCALID", kBecause);
  info.source = "slurm";
  const auto nodes =
      expand_node_list(environment("SLURM_STEP_NODELIST").value_or(environment("SLURM_JOB_NODELIST").value_or("")));
  info.local_size = nodes.size() == 1 ? info.size : 0;
  if (const auto per_node = environment("SLURM_STEP_TASKS_PER_NODE")) {
    const auto tasks = expand_tasks_per_node(*per_node);
    const int node = required_number(environment, "SLURM_NODEID", kBecause);
    TESSERA_CHECK(
        tasks.size() == nodes.size() && static_cast<size_t>(node) < tasks.size() &&
            std::accumulate(tasks.begin(), tasks.end(), int64_t{0}) == info.size,
        ErrorKind::kConfig,
        "[comm.rendezvous] SLURM_STEP_TASKS_PER_NODE={} does not fit SLURM_STEP_NUM_TASKS={}, SLURM_NODEID={} and "
        "{} nodes",
        *per_node, info.size, node, nodes.size());
    info.local_size = tasks[node];
  }
  check_info(info, {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"});
  choose_endpoint(point, environment, nodes.front(),
                  environment("SLURM_JOB_ID").value_or("") + "." + environment("SLURM_STEP_ID").value_or(""));
  return point;
}

RendezvousPoint mpi_rendezvous(const Environment& environment) {
  RendezvousPoint point;
  WorldInfo& info = point.info;
  constexpr RankVariables kOpenMpi = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                      "OMPI_COMM_WORLD_LOCAL_SIZE"};
  constexpr RankVariables kPmi = {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
  info = read_info(environment, environment("OMPI_COMM_WORLD_SIZE") ? kOpenMpi : kPmi,
                   "an MPI launcher started this process");
  info.source = "mpi";
  if (info.size == 1) return point;
  TESSERA_CHECK(
      environment("MASTER_ADDR") || info.local_size == info.size, ErrorKind::kConfig,
      "[comm.rendezvous] MASTER_ADDR is not set, though MPI started ranks on several hosts. Set it to an address of "
      "rank 0's host, and MASTER_PORT to a free port there.");
  std::string job;
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"}) {
    if (job.empty()) job = environment(name).value_or("");
  }
  TESSERA_CHECK(
      !job.empty() || environment("MASTER_PORT"), ErrorKind::kConfig,
      "[comm.rendezvous] MASTER_PORT is not set, and this MPI launcher names no job. Set it to a free port of rank "
      "0's host.");
  choose_endpoint(point, environment, "127.0.0.1", job);
  return point;
}

// --nproc and --nnodes may be given although a launcher started the ranks; they must then agree with the launcher.
void check_against_flags(const RendezvousPoint& point, const RendezvousFlags& flags) {
  const WorldInfo& info = point.info;
  TESSERA_CHECK(
      flags.nproc <= 1 || info.local_size == 0 || flags.nproc == info.local_size, ErrorKind::kConfig,
      "[comm.rendezvous] --nproc {}, but {} started {} of {} ranks on this host. Omit --nproc to join the started "
      "ranks.",
      flags.nproc, info.source, info.local_size, info.size);
  TESSERA_CHECK(flags.nnodes <= 1 || info.local_size != info.size, ErrorKind::kConfig,
                "[comm.rendezvous] --nnodes {}, but {} started all {} ranks on this host", flags.nnodes, info.source,
                info.size);
}

}  // namespace

Environment process_environment() {
  return [](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value && *value ? std::optional<std::string>(value) : std::nullopt;
  };
}

std::string RendezvousPoint::place() const {
  if (info.size == 1) return "no other rank";
  const bool ipv6 = host.find(':') != host.npos;
  return !folder.empty() ? folder : ipv6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

namespace {

// Whether Tessera's launcher started this process directly, and not a torchrun that runs inside a rank. The launcher
// sets TORCHELASTIC_RUN_ID and TESSERA_LAUNCH_ID to one value. Such a torchrun sets another TORCHELASTIC_RUN_ID for its
// own ranks, while they inherit TESSERA_LAUNCH_ID unchanged.
bool started_by_tessera_launcher(const Environment& environment) {
  if (!environment("TESSERA_RENDEZVOUS")) return false;
  const auto run = environment("TORCHELASTIC_RUN_ID");
  return !run || run == environment("TESSERA_LAUNCH_ID");
}

}  // namespace

std::string launcher_name(const Environment& environment) {
  if (started_by_tessera_launcher(environment)) return "flags";
  if (environment("RANK") || environment("WORLD_SIZE")) return "torchrun";
  if (environment("SLURM_STEP_NUM_TASKS") && environment("SLURM_PROCID")) {
    return "slurm";  // the script of sbatch itself runs in no step, and is no rank
  }
  if (environment("OMPI_COMM_WORLD_SIZE") || environment("PMI_SIZE")) return "mpi";
  return "single";
}

namespace {

// The name of the run, which distinguishes it from another run at the same port: TESSERA_RUN_ID, or the launcher's name
// of the job; "" when there is none.
std::string run_of(const std::string& source, const Environment& environment) {
  if (const auto given = environment("TESSERA_RUN_ID")) return *given;
  if (source == "slurm") {
    return fmt::format("Slurm {}.{}", environment("SLURM_JOB_ID").value_or(""),
                       environment("SLURM_STEP_ID").value_or(""));
  }
  if (source == "mpi") return environment("PMIX_NAMESPACE").value_or("");
  const std::string torchrun = environment("TORCHELASTIC_RUN_ID").value_or("none");
  return source == "torchrun" && torchrun != "none" ? torchrun : "";
}

}  // namespace

std::string run_token(const Environment& environment) {
  constexpr size_t kLongest = 4096;
  const auto file = environment("TESSERA_TOKEN_FILE");
  if (const auto token = environment("TESSERA_TOKEN"); token || !file) return token.value_or("");
  std::string token = read_file(*file, kLongest);
  while (!token.empty() && (token.back() == '\n' || token.back() == '\r')) token.pop_back();
  TESSERA_CHECK(!token.empty(), ErrorKind::kConfig, "[comm.rendezvous] TESSERA_TOKEN_FILE={}: is empty, wanted a token",
                *file);
  return token;
}

RendezvousPoint find_rendezvous(const RendezvousFlags& flags, const Environment& environment) {
  const std::string source = launcher_name(environment);
  RendezvousPoint point;
  if (source == "flags") point = launcher_rendezvous(environment);
  if (source == "torchrun") point = torchrun_rendezvous(environment);
  if (source == "slurm") point = slurm_rendezvous(environment);
  if (source == "mpi") point = mpi_rendezvous(environment);
  if (source == "single" && flags.nnodes > 1 && flags.nproc <= 1) point = flags_rendezvous(flags);
  point.run = run_of(source, environment);
  point.token = run_token(environment);
  if (source != "single") {
    check_against_flags(point, flags);
    return point;
  }
  TESSERA_CHECK(
      flags.nproc <= 1, ErrorKind::kConfig,
      "[comm.rendezvous] --nproc {}: no launcher started this process. Start the ranks with 'tessera launch --nproc {} "
      "-- ...'.",
      flags.nproc, flags.nproc);
  return point;
}

}  // namespace tessera::comm
