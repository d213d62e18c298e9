#!/bin/bash
# The job of recipe.yaml, written by `mopd slurm`. `sbatch 'runs/it'"'"'s 100 % $HOME/job/job.sh'` submits it again.
#
# What stands where:
#   node 0: ranks 0 to 15 of the student on GPUs 0 to 15
#   node 1: teachers.it's; $(touch gone) "a.b".0 on GPU 0
#
#SBATCH --job-name="mopd-it's 100 % $HOME"
#SBATCH --chdir=/home/me
#SBATCH --output="/home/me/runs/it's 100 %% $HOME/logs/job/%j.log"
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --array=0-1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=16
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH "--comment=it's # $HOME"


seeds=(3 17)
seed=${seeds[$SLURM_ARRAY_TASK_ID]}
run='runs/it'"'"'s 100 % $HOME'/seed_$seed
own=('run_dir="runs/it'"'"'s 100 % $HOME'"/seed_$seed\"" "seed=$seed")  # keys of this run, as YAML
recipe='runs/it'"'"'s 100 % $HOME/job/recipe.yaml'
mapfile -t nodes_0 < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

mopd=(mopd)
step=(srun --overlap --cpu-bind=none --mem=0)  # beside others: cores and memory are shared
interface='$(it)'"'"'s'
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$interface}"
declare -A addresses  # node -> its address on this interface
# shellcheck disable=SC2016 # for the nodes
while read -r node address; do addresses[$node]=$address; done < <("${step[@]}" --nodes=2 --ntasks=2 --ntasks-per-node=1 \
  bash -c 'echo "$SLURMD_NODENAME $(ip -4 -o address show dev "$0" 2>&1 | grep -o "inet [0-9.]*" | cut -d" " -f2 | head -n 1)"' "$interface")
for node in "${nodes_0[@]}"; do
  [ -n "${addresses[$node]}" ] || { echo "mopd: error: slurm.interface: $interface has no IPv4 address on $node: name one that all nodes have (ip address)"; exit 2; }
done
cache=/tmp/mopd-$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')  # writable for any user, and no name that others could take first
export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$cache/vllm}" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$cache/triton}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}" FLASHINFER_WORKSPACE_BASE="${FLASHINFER_WORKSPACE_BASE:-$cache}" CUDA_CACHE_PATH="${CUDA_CACHE_PATH:-$cache/cuda}"
step+=('--container-image=nvcr.io#nvidia/pytorch:25.06-py3' '--container-mounts=/home/me:/home/me,/my models:/models' --container-workdir=/home/me --container-name="mopd-$SLURM_JOB_ID")  # the first step on a node unpacks the image, for all
here=("${step[@]}" --nodes=1 --ntasks=1 --nodelist="${nodes_0[0]}")  # before what runs on this node: its container begins with a step

address_of() {  # NODE: its address, as its name may mean nothing elsewhere
  echo "${addresses[$1]}"
}
MOPD_RUN_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')  # against what others write into the launchers' store
export MOPD_RUN_SECRET
head=$(address_of "${nodes_0[0]}")
port=$((20000 + SLURM_JOB_ID % 2500 * 4))  # and the next two: jobs that share a node have different ones

# shellcheck disable=SC2317,SC2329 # steps call it too
on_gpus() {  # NUMBERS COMMAND…: it sees these of the job's GPUs on its node, and no others
  local all own=() number
  IFS=, read -ra all <<<"$CUDA_VISIBLE_DEVICES"
  for number in $1; do own+=("${all[number]}"); done
  CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${own[*]}")" exec "${@:2}"
}
export -f on_gpus

# shellcheck disable=SC2317,SC2329 # the trap calls it
request() {  # WHO: what `mopd stop` writes; no container has to start for it
  mkdir -p "$run"
  printf '{"by": "%s", "is_users": false}\n' "$1" >"$run/.stop.$BASHPID" && mv "$run/.stop.$BASHPID" "$run/stop"
}

stopping=
# shellcheck disable=SC2317,SC2329 # the trap calls it
ask_to_stop() {  # SIGNAL: the limit comes near, another job needs the nodes, or scancel was called
  local why="whose time is up"
  [ -z "$stopping" ] || return 0  # the first one's reason counts
  stopping=1
  [ "$1" = USR1 ] || case $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) in
    RUNNING*) why="which is preempted" ;;
    ?*) why="which was cancelled" ;;
    *) why="which got SIGTERM, and squeue does not say why" ;;
  esac
  request "job $SLURM_JOB_ID, $why"
}
trap 'ask_to_stop USR1' USR1
trap 'ask_to_stop TERM' TERM

await() {  # PROCESS: its exit code; a signal's trap runs meanwhile
  local code
  while wait "$1"; code=$?; [ "$code" -gt 128 ] && kill -0 "$1" 2>/dev/null; do :; done
  return "$code"
}

finish() {  # EXIT-CODE: the end of this job, or its way back into the queue
  case $1 in
    0 | 2) exit "$1" ;;                   # done, or a line has said what to change: it would come again
    75) [ -n "$stopping" ] || exit 75 ;;  # `mopd stop` ends the job for good
  esac
  case $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) in
    RUNNING*)  # and not being cancelled
      echo "job $SLURM_JOB_ID: exit code $1: back into the queue"
      scontrol requeue "$SLURM_JOB_ID"
      ;;
    "") echo "job $SLURM_JOB_ID: exit code $1: not back into the queue, as squeue does not say whether it was cancelled" ;;
  esac
  exit "$1"
}

# Do the nodes go together? One line says what does not.
# shellcheck disable=SC2016 # the task on the node knows its number
"${step[@]}" --nodes=2 --ntasks=2 --ntasks-per-node=1 \
  bash -c 'exec "$@" --node-rank "$SLURM_PROCID"' check \
  "${mopd[@]}" check "$recipe" --nodes --nnodes 2 --rdzv-endpoint "$head:$((port + 1))" "${own[@]}" &
await $! || finish $?

is_lost() {  # NODE: whether Slurm has lost it; a star marks one that does not answer
  case $(sinfo --noheader --nodes="$1" --format=%T) in
    *down* | *drain* | *fail* | *\*) ;;
    *) return 1 ;;
  esac
}
serve() {  # NODE ROLE GPUS ARGUMENTS…: a replica, which registers with the run
  local node=$1 role=$2 code began failures=0 start=()
  shift 2
  start=(bash -c 'on_gpus "$@"' serve "$1")
  shift
  while :; do
    mkdir -p "$run/logs/$node"
    began=$SECONDS
    "${step[@]}" --nodes=1 --ntasks=1 --nodelist="$node" \
      "${start[@]}" "${mopd[@]}" serve "$recipe" "$@" --register "$run/replicas" --host "$(address_of "$node")" "${own[@]}" \
      >>"$run/logs/$node/$role.log" 2>&1
    code=$?
    [ "$code" -ne 0 ] || is_lost "$node" || return 0  # it was asked to; but to srun a lost node's step has ended with 0
    if [ "$code" -eq 2 ] && [ ! -e "$run/metrics.jsonl" ]; then  # the recipe's fault: end what waits for it
      echo "$role has ended with an error: $run/logs/$node/$role.log"
      while [ ! -e "$run/metrics.jsonl" ]; do  # a start forgets older requests
        request "$role, which has ended with an error"
        sleep 5
      done
      return
    fi
    [ $((SECONDS - began)) -lt 3600 ] || failures=0
    failures=$((failures + 1))
    echo "$role has ended on $node with exit code $code, $failures of 4 in a row: $run/logs/$node/$role.log"
    [ "$failures" -lt 4 ] || return
    sleep $((5 * 2 ** (failures - 1)))
  done
}
serve "${nodes_0[1]}" 'teachers.it%27s%3B %24%28touch gone%29 %22a.b%22.0' 0 --teacher='it'"'"'s; $(touch gone) "a.b"' --replica 0 &

# The trainer: a launcher on each of the student's nodes. The first one's exit code is the run's.
trainer=("${here[@]}" bash -c 'on_gpus "$@"' task '0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15')
"${trainer[@]}" "${mopd[@]}" train "$recipe" --resume=auto "${own[@]}" &
await $!
code=$?
finish "$code"
