#!/usr/bin/env bash
# Starts or joins a Ray cluster, submits training to it, and ends what it has started; see usage below.
set -euo pipefail

usage() {
  cat <<'USAGE'
A Ray cluster for scripts/train_ppo.py.

  scripts/launch_ray.sh head [--host IP] [--port N] [--dashboard-port N] [--state FOLDER] [-- ARGS OF ray start]
  scripts/launch_ray.sh join IP:PORT [--state FOLDER] [-- ARGS OF ray start]
  scripts/launch_ray.sh submit [--address URL] [--state FOLDER] -- ARGS OF train_ppo.py
  scripts/launch_ray.sh stop [--state FOLDER]

head    starts a cluster on this machine. Without --host it is meant for this machine alone; for several give the IP under which
        the others reach this one. Ports: 6379, dashboard and jobs 8265 on loopback.
join    adds this machine to the cluster of IP:PORT, as head has printed it.
submit  uploads the repository (without what .gitignore names), runs scripts/train_ppo.py with ARGS as a job on the cluster that
        head has started, or on that of the dashboard at URL, follows its log, and ends with the exit code of the job. Ctrl-C ends
        the following, not the job. The job runs in the uploaded copy: give models, prompts and --save as absolute paths that
        every machine has.
stop    ends the processes that head or join has started with this --state on this machine, and no others.

--state FOLDER holds what stop and submit need to know, and Ray's output [runs/ray].

Ray listens on all network interfaces and cannot be told otherwise, so a token is its lock: a process without it is refused. head
makes one in ~/.ray/auth_token where none is; every machine needs the same file (or RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN).

Example, two machines of 8 GPUs:
  first$  scripts/launch_ray.sh head --host 10.0.0.1
  other$  scripts/launch_ray.sh join 10.0.0.1:6379        # with the first one's ~/.ray/auth_token
  first$  scripts/launch_ray.sh submit -- --config configs/qwen3-4b_8gpu.yaml --seed 1
  first$  scripts/launch_ray.sh stop                      # and the same on the other
USAGE
}

MARK=SLIME_PPO_RAY_CLUSTER # every process that is started here carries it in its environment, and its children do
STOP_S=15

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# Pids of the processes that carry the mark $1, but for those whose command line holds $2. /proc shows a process's first
# environment; whoever rewrites his own (Ray's agents and workers do, for their names) has a parent that is found, and ends with it.
marked() {
  local file pid
  { grep -lzx "$MARK=$1" /proc/[0-9]*/environ 2>/dev/null || true; } | while read -r file; do
    pid=${file#/proc/} pid=${pid%/environ}
    if [[ -z ${2:-} ]] || ! grep -qa "$2" "/proc/$pid/cmdline" 2>/dev/null; then
      echo "$pid"
    fi
  done
}

# The value of key $1 in the state file.
known() {
  sed -n "s/^$1=//p" "$state_file" 2>/dev/null || true
}

need_ray() {
  command -v ray >/dev/null || PATH=$root/.venv/bin:$PATH # an activated environment comes first
  command -v ray >/dev/null || fail "no ray in PATH and none in $root/.venv: activate the environment, or run \`make setup\`"
}

need_token() {
  need_ray
  export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
  local file=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
  if [[ $RAY_AUTH_MODE != token || -n ${RAY_AUTH_TOKEN:-} || -s $file ]]; then
    return
  fi
  if [[ $1 == head ]]; then
    ray get-auth-token --generate >/dev/null
    echo "made a token: every machine of the cluster needs a copy of $file, readable for you alone"
  else
    fail "no token in $file. Copy that file from the machine on which \`launch_ray.sh head\` has run"
  fi
}

# Starts the processes of this machine's node; "$@" are the arguments of ray start.
start_node() {
  local mark tries=0
  mark=$(known mark)
  if [[ -n $mark && -n $(marked "$mark") ]]; then
    fail "$state_file: its cluster still runs here. End it by \`launch_ray.sh stop --state $state\`, or give another --state"
  fi
  mark=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  mkdir -p "$state"
  printf 'mark=%s\ndashboard=%s\ncluster=%s\n' "$mark" "$dashboard" "$cluster" >"$state_file"
  export RAY_raylet_start_wait_time_s=${RAY_raylet_start_wait_time_s:-90} # 30 s is too short on a busy machine
  # a session of its own: the terminal's end and Ctrl-C do not reach it
  until env "$MARK=$mark" setsid --wait ray start --disable-usage-stats "$@" >"$state/start.log" 2>&1 </dev/null; do
    end_marked "$mark"
    if ((tries == 1)); then
      rm -f "$state_file"
      tail -n 20 "$state/start.log" >&2
      fail "Ray did not start; the whole output is in $state/start.log"
    fi
    tries=1 # its first process gives its agents 15 s, whatever one sets, and a second try finds them in the file cache
    echo "Ray did not start, trying once more" >&2
  done
}

# Sends signal $1 to the processes that `marked $2 $3` tells, and waits STOP_S seconds for their end.
signal_marked() {
  local pids waited
  for ((waited = 0; waited < 5 * STOP_S; waited++)); do
    pids=$(marked "$2" "${3:-}")
    [[ -n $pids ]] || return 0
    # shellcheck disable=SC2086  # one pid a word; some may have ended by now
    ((waited > 0)) || kill -"$1" $pids 2>/dev/null || true
    sleep 0.2
  done
}

# Ends the processes that carry the mark $1. gcs_server comes last: it does not end while others of its node still do.
end_marked() {
  signal_marked TERM "$1" gcs_server
  signal_marked TERM "$1"
  signal_marked KILL "$1"
  [[ -z $(marked "$1") ]] || fail "these processes do not end: $(marked "$1" | tr '\n' ' ')"
}

stop_node() {
  local mark
  mark=$(known mark)
  if [[ -z $mark ]]; then
    echo "nothing to stop: $state_file names no cluster that was started here"
    return
  fi
  end_marked "$mark"
  rm -f "$state_file"
  echo "stopped the cluster's processes on this machine"
}

submit_job() {
  local address=$1 id
  shift
  id=train-$(date +%Y%m%d-%H%M%S)-$$
  trap 'echo "the job goes on; end it by: ray job stop --address $address $id" >&2; exit 130' INT
  ray job submit --address "$address" --submission-id "$id" --working-dir "$root" -- python scripts/train_ppo.py "$@" || true
  exit "$(job_exit_code "$address" "$id")"
}

# Waits for the end of job $2 at $1, should the following have ended before it, and prints its exit code; 1 where it has none.
job_exit_code() {
  python - "$1" "$2" <<'PYTHON' || echo 1
import sys
import time

from ray.job_submission import JobSubmissionClient

client = JobSubmissionClient(sys.argv[1])
while not (job := client.get_job_info(sys.argv[2])).status.is_terminal():
    time.sleep(2)
code = job.driver_exit_code
print((0 if job.status == "SUCCEEDED" else 1) if code is None else code if code >= 0 else 128 - code)
PYTHON
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

verb=${1:-}
shift || true
host=127.0.0.1 port=6379 dashboard_port=8265 address="" node="" cluster="" state=$root/runs/ray
case $verb in
  head | submit | stop) ;;
  join)
    node=${1:-}
    [[ $node == *:* ]] || fail "join needs the address of the head as IP:PORT, found '${node}'"
    shift
    ;;
  -h | --help | help)
    usage
    exit 0
    ;;
  *) fail "expected head, join, submit or stop, found '${verb}'; --help tells more" ;;
esac
while (($#)); do
  case $verb:$1 in
    *:--)
      shift
      break
      ;;
    *:-h | *:--help)
      usage
      exit 0
      ;;
    head:--host | head:--port | head:--dashboard-port | submit:--address | *:--state)
      (($# > 1)) || fail "$1 needs a value"
      name=${1#--}
      printf -v "${name//-/_}" %s "$2"
      shift 2
      ;;
    *) fail "$verb takes no $1; arguments for what it starts come behind --. --help tells more" ;;
  esac
done
state=$(realpath -m -- "$state")
state_file=$state/cluster
dashboard=http://127.0.0.1:$dashboard_port

case $verb in
  head)
    need_token head
    cluster=$host:$port
    start_node --head --node-ip-address="$host" --port="$port" --dashboard-host=127.0.0.1 --dashboard-port="$dashboard_port" "$@"
    echo "the cluster is up at $host:$port; submit with: scripts/launch_ray.sh submit -- --config ..."
    ;;
  join)
    dashboard=""
    need_token join
    start_node --address="$node" "$@"
    echo "this machine has joined $node"
    ;;
  submit)
    (($#)) || fail "submit needs the arguments of train_ppo.py behind --, as in: submit -- --config configs/qwen3-4b_8gpu.yaml"
    if [[ -z $address ]]; then
      address=$(known dashboard)
      # Ray tells a job the address of whatever cluster was started last on its machine
      [[ " $*" == *" --ray-address"* ]] || set -- "$@" --ray-address "$(known cluster)"
    fi
    [[ -n $address ]] || fail "no cluster was started here ($state_file). Start one by \`launch_ray.sh head\`, or give --address"
    need_token submit
    submit_job "$address" "$@"
    ;;
  stop) stop_node ;;
esac
