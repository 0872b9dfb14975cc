#!/bin/bash
# Starts a program on several hosts over ssh, with one Tessera launcher per host, and waits for all of them.
#
#   ./ssh.sh -n 8 hostA,hostB,hostC -- tessera train recipe.yaml checkpoint.dir=/shared/runs/a
#
#   -n N        ranks on each host [1]
#   -p PORT     port on the first host at which all hosts meet [29500]
#   -m ADDRESS  address of the first host for the other hosts [its name in the list]
#   -r N        restart all hosts, at most N times, after a connection or a host was lost [0]
#   -d DIR      working folder on every host [the current one]
#
# Every host needs the same files at the same paths. This script makes the token that ranks need to join the run. It
# sends the token through ssh's standard input, so that no list of processes shows it. When this script is stopped, or
# its connection to a host is lost, the launcher of the host gets SIGTERM. The variable SSH replaces the command ssh.
set -euo pipefail

usage() { sed -n '4,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }

ranks=1 port=29500 master='' restarts=0 folder=$PWD
while getopts n:p:m:r:d:h option; do
  case $option in
    n) ranks=$OPTARG ;;
    p) port=$OPTARG ;;
    m) master=$OPTARG ;;
    r) restarts=$OPTARG ;;
    d) folder=$OPTARG ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
[[ $# -ge 3 && $2 == -- ]] || usage
IFS=, read -r -a hosts <<<"$1"
shift 2
tessera=${TESSERA:-tessera}
run=$(basename "$1")-$$-$(date +%s)
pids=()

# The lifeline is a pipe that only this script keeps open for writing. When the script ends, for any reason, every ssh
# reads the end of the pipe, and the remote shell stops its launcher.
fifo_folder=$(mktemp -d)
mkfifo "$fifo_folder/lifeline"
# shellcheck disable=SC2094
exec {both}<>"$fifo_folder/lifeline" {reader}<"$fifo_folder/lifeline" {lifeline}>"$fifo_folder/lifeline" {both}>&-
rm -r "$fifo_folder"

stopping=0 signalled=0
stop() { # makes the ranks save and end; a second signal ends the script at once
  ((stopping == 0)) || { kill "${pids[@]}" 2>/dev/null || true; exit 143; }
  stopping=1 signalled=1
  exec {lifeline}>&-
}
trap stop INT TERM HUP

quoted() { # WORD...: prints the words, quoted for any shell
  local word
  for word in "$@"; do printf "'%s' " "${word//\'/\'\\\'\'}"; done
}

feed() { # TOKEN: prints the input of one ssh, the token and then the lifeline
  printf '%s\n' "$1"
  exec cat <&"$reader" 2>/dev/null
}

# Runs all hosts once. Returns the exit code of the first host that fails.
run_once() {
  local attempt=$1 token code=0 left number launch remote_command
  shift
  token=$(head -c 24 /dev/urandom | base64)
  pids=()
  for number in "${!hosts[@]}"; do
    launch=$(quoted "$tessera" launch --nproc "$ranks" --nnodes "${#hosts[@]}" --node-rank "$number" \
      --master "${master:-${hosts[0]}}:$port" --run-id "$run-$attempt" -- "$@")
    # ssh -tt would also end the remote shell when the connection ends, but it mixes stdout and stderr.
    remote_command="cd $(quoted "$folder") && read -r TESSERA_TOKEN && export TESSERA_TOKEN || exit 2
      exec 3<&0 </dev/null
      $launch 3<&- & launcher=\$!
      { while read -r nothing; do :; done <&3; kill -TERM \$launcher; } >/dev/null 2>&1 & watcher=\$!
      wait \$launcher; code=\$?
      kill \$watcher 2>/dev/null
      exit \$code"
    # shellcheck disable=SC2086
    ${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=15} "${hosts[number]}" "exec sh -c $(quoted "$remote_command")" \
      < <(exec {lifeline}>&- && feed "$token") {lifeline}>&- {reader}<&- &
    pids+=($!)
  done
  for ((left = ${#pids[@]}; left > 0; )); do
    local ended=0
    wait -n || ended=$?
    if ((signalled)); then # a signal ended the wait, and no host has ended
      signalled=0
      [[ -n $(jobs -rp) ]] || break
      continue
    fi
    ((code != 0 || ended == 0)) || code=$ended
    left=$((left - 1))
  done
  pids=()
  return "$code"
}

for ((attempt = 0; ; ++attempt)); do
  code=0
  run_once "$attempt" "$@" || code=$?
  # Restart after 4 (a rank or a connection was lost), 255 (ssh itself failed), and 128 and above (a rank was killed).
  if ((code == 0 || stopping || attempt >= restarts || (code != 4 && code < 128))); then exit "$code"; fi
  echo "ssh.sh: code $code, start $((attempt + 2)) of $((restarts + 1))" >&2
done
