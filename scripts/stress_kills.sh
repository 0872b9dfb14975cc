#!/usr/bin/env bash
# scripts/stress_kills.sh [-n TIMES] [-j AT_ONCE] [-d DELAYS] [-o FOLDER] [FILTER...]
#
# Runs each test of kills, restarts and time-outs TIMES times (100), with AT_ONCE runs in parallel (12). Random delays
# are inserted before the system calls with which ranks connect, communicate and wait
# (tests/support/delays/drawn_delays.cc). Prints the number of failures and the time of the longest run of each test.
# Exits with 1 if a run failed.
#
# FILTER    gtest filters in the form PROGRAM:FILTER, instead of the list below
# DELAYS    how many of 1,000 calls are delayed, and the longest delay in microseconds (default "10 3000"; "0 0": none)
# FOLDER    gets the output of failed runs (build/stress); the name of a file contains the seed
#
# A run that exceeds its time limit prints the stacks of all its threads.
set -euo pipefail
cd "$(dirname "$0")/.."

tests='
  test_comm_unit:Watchdog.*:Monitor.*:RunStore.*:RestartPolicy.*
  test_comm_dist:Faults.*
  test_comm_dist:KilledPhases.*
  test_comm_dist:BrokenMessages.*
  test_comm_dist:GroupMaking.*
  test_comm_dist:ShmFault.*
  test_comm_dist:MonitorHold.*
  test_comm_dist:Launcher.*
  test_comm_dist:Restart.*
  test_comm_dist:Rendezvous.*
  test_parallel_dist:PipelineKilled.*
  test_parallel_dist:Pipeline.WhenARankDies*
  test_checkpoint_dist:KilledSaves.*
  test_train_dist:Kills.*
  test_train_dist:Restarts.*
  test_train_dist:HostRestarts.*
  test_train_dist:ClusterExample.*
  test_serve_dist:ServeRanks.ARankThatDies*'
times=100 at_once=12 delays='10 3000' folder=build/stress
while getopts n:j:d:o: option; do
  case $option in
    n) times=$OPTARG ;;
    j) at_once=$OPTARG ;;
    d) delays=$OPTARG ;;
    o) folder=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# = 0 ] || tests=$*
mkdir -p "$folder"
rm -f "$folder"/*.log "$folder/times"

export TESSERA_TORCH=${TESSERA_TORCH:-$(echo "$PWD"/.venv/lib/python3*/site-packages/torch)} TESSERA_PYTHON=$PWD/.venv/bin/python
export TESSERA_ASSETS=$PWD/build/assets TESSERA_PROGRAM=$PWD/build/tessera TESSERA_SOURCE=$PWD XDG_CACHE_HOME=$PWD/build/cache OMP_WAIT_POLICY=PASSIVE
export STRESS_DELAYS=$delays STRESS_FOLDER=$folder TESSERA_TEST_SECONDS=${TESSERA_TEST_SECONDS:-300}

run_one() {  # run_one PROGRAM TEST SEED
  local log status=0 begun=${EPOCHREALTIME/./}
  log=$STRESS_FOLDER/$(tr / _ <<<"$2").$3.log
  LD_PRELOAD=$PWD/build/tests/libdrawn_delays.so TESSERA_TEST_DELAYS="$3 $STRESS_DELAYS" "build/$1" --gtest_filter="$2" --gtest_brief=1 >"$log" 2>&1 </dev/null || status=$?
  echo "$1:$2 $(((${EPOCHREALTIME/./} - begun) / 1000)) $status" >>"$STRESS_FOLDER/times" # a single write keeps the line whole
  if [ $status = 0 ]; then rm -f "$log"; fi
}
export -f run_one

# Runs each test in its own process, as ctest does, in random order.
for each in $tests; do
  program=${each%%:*}
  "build/$program" --gtest_list_tests --gtest_filter="${each#*:}" |
    awk -v program="$program" '/^[^ ]/ {suite = $1} /^ / && !/DISABLED_/ && suite !~ /DISABLED_/ {print program, suite $1}'
done | awk -v times="$times" -v seed="$RANDOM" 'BEGIN {srand(seed)} {for (i = 0; i < times; ++i) print rand(), $0, int(rand() * 1e9)}' |
  sort | cut -d' ' -f2- | xargs -P "$at_once" -L 1 bash -c 'run_one "$0" "$1" "$2"'

awk '{runs[$1]++; if ($2 > most[$1]) most[$1] = $2; if ($3 != 0) {failed[$1]++; any = 1}}
  END {for (test in runs) printf "%5d runs %4d failed %8.1f s at most  %s\n", runs[test], failed[test], most[test] / 1000, test | "sort -k7"; close("sort -k7"); exit any}' "$folder/times"
